"""Optimizer state in host memory between steps."""

from wholebatch.offload.choose_store import choose

__all__ = ["choose"]
