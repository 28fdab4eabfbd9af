"""Running one micro-step: eagerly, as one compiled graph, or as a CUDA graph of it."""

from wholebatch.compile.messages import ExecuteWarning
from wholebatch.compile.micro_step import Executor
from wholebatch.compile.when_to_compile import Execute, check_execute

__all__ = ["Execute", "ExecuteWarning", "Executor", "check_execute"]
