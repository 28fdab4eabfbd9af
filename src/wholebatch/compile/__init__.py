"""Run one micro-step: eagerly, as one compiled graph, or as a CUDA graph."""

from wholebatch.compile.execute_mode import Execute, ExecuteWarning, check_execute

__all__ = ["Execute", "ExecuteWarning", "check_execute"]
