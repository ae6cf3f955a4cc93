"""Decides in which precision each equation runs, and runs it."""
