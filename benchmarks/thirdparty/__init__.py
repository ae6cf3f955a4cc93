"""Programs that others wrote, run as they are under autocast."""
