"""How one micro-step runs: eagerly, as one compiled graph, or as a recording of it."""

from wholebatch.execute.executor import Execute, Executor, check_execute
from wholebatch.execute.notes import ExecuteWarning

__all__ = ["Execute", "ExecuteWarning", "Executor", "check_execute"]
