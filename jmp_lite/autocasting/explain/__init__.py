"""What autocast does with a function, in rows and words."""
