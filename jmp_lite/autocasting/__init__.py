"""The function transformation ``autocast``, its rules, and the tools around it."""
