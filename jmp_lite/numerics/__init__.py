"""Finds numbers that overflow, become zero, or are not finite."""
