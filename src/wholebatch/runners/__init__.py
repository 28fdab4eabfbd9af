"""Runners that feed the micro-batches of a window: sequential, lock-step, two-pass, pipeline."""
