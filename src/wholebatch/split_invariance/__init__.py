"""Whether a trainer's update depends on how its samples are cut into micro-batches and ranks."""

from wholebatch.split_invariance.check import Split, SplitReport, split_invariance

__all__ = ["Split", "SplitReport", "split_invariance"]
