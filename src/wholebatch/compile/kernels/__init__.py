"""Triton kernels. Triton ships with torch's CUDA builds and is imported only for a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

__all__ = ["computes_rightly"]


class _Unusable(Exception):
    """Raised if the operation cannot run."""


def computes_rightly(
    device: torch.device,
    name: str,
    operation: Callable[[], Any],
    agrees: Callable[[Callable[..., Any], torch.device], bool],
) -> bool:
    """True if this device has the kernel of that name and its operation passes `agrees`.

    `agrees(run, device)` runs it on test data and compares. It must not draw random numbers, so
    that the user's generators are left alone.
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
        except Exception as problem:  # A compiler may raise anything; the unfused code still works.
            raise _Unusable from problem

    try:
        return agrees(run, device)
    except _Unusable:
        return False
