"""Explains what autocast does with a function."""
