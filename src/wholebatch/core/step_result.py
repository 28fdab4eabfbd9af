"""What one closed window reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Step"]


@dataclass(frozen=True)
class Step:
    """One update: its exact mean loss, and what happened on the way.

    `loss` is the mean over all units of the window and of all ranks; `grad_norm` is the norm of
    the normalised gradient, after `on_gradient=` and before clipping; `skipped` is the reason when
    no update was made.
    """

    update: int
    loss: float
    units: float
    grad_norm: float
    micro_batches: int
    seconds: float
    clip: float = 1.0
    loss_scale: float = 1.0
    terms: Mapping[str, float] = field(default_factory=dict)
    skipped: str | None = None
