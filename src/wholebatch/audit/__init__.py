"""Laws of a window: one law, one file."""
