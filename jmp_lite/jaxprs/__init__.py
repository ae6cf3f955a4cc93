"""Reads, analyses and rebuilds jaxprs."""
