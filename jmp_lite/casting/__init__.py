"""Dtypes and their names, casts of pytrees, and policies."""
