"""Rewrites of a loop's body that change no result."""
