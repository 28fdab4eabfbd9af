"""One window: begin, add, close. Here the library keeps its promise."""
