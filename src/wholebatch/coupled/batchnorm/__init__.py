"""BatchNorm under gradient accumulation: exact in lock-step, or by another policy."""
