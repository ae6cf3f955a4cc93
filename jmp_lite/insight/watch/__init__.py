"""Counts the numbers of each op that overflow, become zero, or are not finite."""
