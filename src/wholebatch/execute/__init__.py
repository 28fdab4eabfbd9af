"""Running one micro-step: eagerly, as one compiled graph, or as a CUDA graph of it."""

from wholebatch.execute.executor import Executor
from wholebatch.execute.notes import ExecuteWarning
from wholebatch.execute.plan import Execute, check_execute

__all__ = ["Execute", "ExecuteWarning", "Executor", "check_execute"]
