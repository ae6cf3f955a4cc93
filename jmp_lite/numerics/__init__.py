"""Where numbers overflow, vanish or stop being finite."""
