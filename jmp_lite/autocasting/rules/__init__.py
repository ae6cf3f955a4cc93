"""What the rules are: precisions, the table of ops, presets, and their JSON."""
