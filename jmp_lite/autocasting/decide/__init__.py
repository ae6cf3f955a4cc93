"""Decides the precision of each equation; nothing here runs one."""
