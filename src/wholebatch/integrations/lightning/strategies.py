"""What Lightning's strategies do with gradients, and which of them are supported."""

from __future__ import annotations

from typing import Any

from wholebatch.errors import UnsupportedError
from wholebatch.integrations.host_window import Gradients

__all__ = ["REPLICATED", "check_strategy", "gradients_of", "scales"]

REPLICATED = ("SingleDeviceStrategy", "DDPStrategy")  # every process holds whole gradients
_STRATEGIES = (*REPLICATED, "FSDPStrategy", "ModelParallelStrategy")


def gradients_of(strategy: Any) -> Gradients:
    return "whole" if type(strategy).__name__ in REPLICATED else "sharded"


def scales(precision: Any) -> bool:
    scaler = getattr(precision, "scaler", None)
    return scaler is not None and bool(scaler.is_enabled())


def check_strategy(strategy: Any) -> None:
    name = type(strategy).__name__
    if name not in _STRATEGIES or getattr(strategy, "handles_gradient_accumulation", False):
        raise UnsupportedError(
            f"Lightning's {name}: the update is not shown to be that of the undivided batch; "
            f"supported are {', '.join(_STRATEGIES)}"
        )
    if getattr(strategy, "_tensor_parallel_size", 1) not in (1, "auto"):
        raise UnsupportedError(
            "Lightning's ModelParallelStrategy with tensor parallelism: units would be counted "
            "more than once over ranks that share a batch; use data parallelism alone"
        )
