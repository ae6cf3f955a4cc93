"""Small programs of many kinds, in float32, in mixed precision and by hand."""
