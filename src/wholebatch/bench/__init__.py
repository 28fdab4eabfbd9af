"""One batch through every loop that trains on it in parts: ours, manual ones, other libraries'."""

from wholebatch.bench.job import Job
from wholebatch.bench.measure import Bench, Row, bench
from wholebatch.bench.ways import WAYS

__all__ = ["WAYS", "Bench", "Job", "Row", "bench"]
