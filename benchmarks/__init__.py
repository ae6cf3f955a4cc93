"""What XLA makes of our programs, and the numbers that the README quotes."""
