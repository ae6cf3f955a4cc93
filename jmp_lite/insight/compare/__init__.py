"""Compares mixed precision with float32, op by op."""
