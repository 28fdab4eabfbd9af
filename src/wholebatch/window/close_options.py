"""The options of a close, and what is impossible among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch

from wholebatch.errors import OptionError

ClipNorm: TypeAlias = float | Sequence[float | None] | None
Policy: TypeAlias = Literal["raise", "skip"]


@dataclass(frozen=True)
class CloseOptions:
    """Options of the close; impossible values are refused at construction."""

    clip_norm: ClipNorm = None
    clip_value: float | None = None
    nonfinite: Policy = "raise"
    zero_units: Policy = "raise"

    def __post_init__(self) -> None:
        clip = self.clip_norm
        plain = [_plain(norm) for norm in clip] if isinstance(clip, list | tuple) else _plain(clip)
        object.__setattr__(self, "clip_norm", plain)
        object.__setattr__(self, "clip_value", _plain(self.clip_value))

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse what is impossible with these optimizers."""
        if self.clip_norm is not None and self.clip_value is not None:
            raise OptionError(
                "clip_norm= and clip_value= together: give one (the order of two would matter)"
            )
        groups = sum(len(optimizer.param_groups) for optimizer in optimizers)
        clip = self.clip_norm
        norms: Sequence[object] = clip if isinstance(clip, list | tuple) else [clip]
        if norms is clip and len(norms) != groups:
            raise OptionError(
                f"clip_norm={norms!r}: {len(norms)} values for {groups} parameter groups; give one "
                "number for all, or one (or None) for each group"
            )
        for norm in norms:
            _check_positive("clip_norm", norm)
        _check_positive("clip_value", self.clip_value)
        for name in ("nonfinite", "zero_units"):
            if getattr(self, name) not in ("raise", "skip"):
                raise OptionError(f"{name}={getattr(self, name)!r}: must be 'raise' or 'skip'")


def _plain(value: Any) -> Any:
    """Return a Python number: one of NumPy's would round what it is divided by."""
    odd = isinstance(value, Real) and not isinstance(value, int | float)
    return float(value) if odd else value


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{name}={value!r}: must be a positive number, or None for no clipping")
