"""Decides the precision of each equation, and evaluates it."""
