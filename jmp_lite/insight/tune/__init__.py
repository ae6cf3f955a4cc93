"""Finds the rules with the fewest float32 ops for a tolerated error."""
