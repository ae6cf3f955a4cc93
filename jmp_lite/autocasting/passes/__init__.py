"""Rewrites of a converted program that change no result.

``homogeneity.py`` is no rewrite: it analyses backward rules, for loss scales and lints.
"""
