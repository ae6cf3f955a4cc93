"""The rules: precisions, the op table, presets, and JSON."""
