"""Compiled and recorded graphs need a newer torch than the rest."""

from __future__ import annotations

from typing import Any

import torch

from wholebatch.errors import UnsupportedError

_HAS_GRAPHS = hasattr(torch.nn.Parameter, "grad_dtype")  # since torch 2.11


def execute_here(execute: Any) -> Any:
    """Return the way to run a micro-step: eager code where torch is too old for graphs."""
    if _HAS_GRAPHS or execute == "eager":
        return execute
    if execute == "auto":
        return "eager"
    raise UnsupportedError(
        f'execute="{execute}" with torch {torch.__version__}: compiled and recorded graphs need '
        'torch 2.11 or newer; use execute="eager", or "auto"'
    )
