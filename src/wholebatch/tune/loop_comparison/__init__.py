"""One batch through every loop that trains on it in parts: ours, manual ones, other libraries'."""

from wholebatch.tune.loop_comparison.loop_timing import Bench, Row, bench
from wholebatch.tune.loop_comparison.training_job import Job
from wholebatch.tune.loop_comparison.training_loops import WAYS

__all__ = ["WAYS", "Bench", "Job", "Row", "bench"]
