"""The function transformation ``autocast``, its rules, its plan and its run."""
