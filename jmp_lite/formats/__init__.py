"""The number formats of matrix products, one file each."""
