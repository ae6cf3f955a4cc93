"""The rules: precisions of ops and scopes, presets, and JSON."""
