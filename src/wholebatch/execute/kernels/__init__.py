"""Kernels in Triton, which comes with torch's CUDA builds: imported where a CUDA device asks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

__all__ = ["computes_rightly"]


class _Unusable(Exception):
    """The operation could not run."""


def computes_rightly(
    device: torch.device,
    name: str,
    operation: Callable[[], Any],
    agrees: Callable[[Callable[..., Any], torch.device], bool],
) -> bool:
    """Whether this device has the kernel of that name, and its operation `agrees`.

    `agrees(run, device)` runs it on numbers of its own and compares. Nothing may be drawn for that:
    whoever asks, the user's random numbers stay where they are.
    """
    if device.type != "cuda":
        return False
    try:
        import_module(f"{__name__}.{name}")
    except ImportError:
        return False

    def run(*given: Any) -> Any:
        try:
            return operation()(*given)
        except Exception as problem:  # whatever a compiler raises, the plain way is there
            raise _Unusable from problem

    try:
        return agrees(run, device)
    except _Unusable:
        return False
