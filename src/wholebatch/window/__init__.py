"""One window: begin, add, close. The promise of the library is kept here."""
