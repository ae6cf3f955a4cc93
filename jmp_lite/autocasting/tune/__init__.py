"""The fewest float32 ops for a tolerated error."""
