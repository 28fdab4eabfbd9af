"""Running one micro-step: eagerly, as one compiled graph, or as a CUDA graph of it."""

from wholebatch.compile.execute_mode import Execute, ExecuteWarning, check_execute
from wholebatch.compile.micro_step import Executor

__all__ = ["Execute", "ExecuteWarning", "Executor", "check_execute"]
