"""The fewest float32 ops, and the most float8 products, for a tolerated error."""
