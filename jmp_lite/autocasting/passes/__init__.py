"""Rewrites of a converted program that change no result."""
