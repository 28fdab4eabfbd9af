"""Training loops as people write them: a grammar, an oracle and three judges."""
