"""BatchNorm under gradient accumulation: exact over ranks, or by another policy."""
