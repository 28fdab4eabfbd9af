"""The window, its two doors (`WholeBatch` and `Accumulator`), and what both stand on."""
