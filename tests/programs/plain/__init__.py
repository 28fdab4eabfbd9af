"""Training loops as people write them, without wholebatch: a grammar, an oracle and three judges."""
