"""Optax wrappers for 16-bit parameters, and for optimizer state in fewer bits."""
