"""Running one micro-step: eagerly, as one compiled graph, or as a CUDA graph of it."""

from wholebatch.compile.execute_mode import Execute, ExecuteWarning, check_execute

__all__ = ["Execute", "ExecuteWarning", "check_execute"]
