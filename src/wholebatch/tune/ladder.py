"""The ladder: precision, checkpointing, accumulation and offload, alone and one on top of another.

Each step is measured by itself and together with those before it: its peak, its time, how much of
the machine it uses and what bounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wholebatch.tune.bottleneck import Bottleneck
from wholebatch.tune.settings import RunMode, Setting, Trial


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: with all steps before it, and without them."""

    what: str
    together: Trial
    alone: Trial | None
    bottleneck: Bottleneck | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for `tune.json`."""
        bound = self.bottleneck
        return {
            "what": self.what,
            "together": self.together.to_dict(),
            "alone": None if self.alone is None else self.alone.to_dict(),
            "bottleneck": None if bound is None else bound.kind,
            "utilisation": None if bound is None else bound.utilisation,
            "remedy": None if bound is None else bound.remedy,
        }


def climb(
    samples: int,
    micro_batch: int,
    *,
    base: RunMode,
    precision: str | None,
    can_checkpoint: bool,
    offload: str | None,
    measure: Callable[[Setting], Trial],
    bound: Callable[[Trial], Bottleneck],
) -> tuple[Rung, ...]:
    """Measure the steps that apply here.

    `micro_batch` is that of the accumulation step, `offload` the place of the gradients in the last
    one. None leaves a step out.
    """
    changes: list[tuple[str, dict[str, Any], int]] = [("as it is", {}, samples)]
    if precision is not None:
        changes.append((f"{precision} precision", {"precision": precision}, samples))
    if can_checkpoint:
        changes.append(("gradient checkpointing", {"checkpointing": True}, samples))
    steps = -(-samples // micro_batch)
    changes.append((f"accumulation, {micro_batch} × {steps}", {}, micro_batch))
    if offload is not None:
        changes.append((f"gradients: {offload}", {"gradients": offload}, samples))
    rungs: list[Rung] = []
    mode, size = base, samples
    for what, change, own_size in changes:
        before = mode, size
        mode, size = mode._replace(**change), min(size, own_size)
        together = measure(Setting(size, mode))
        if together.status == "stopped":  # Far too slow here: the next steps do without it.
            mode, size = before
        alone = None
        if len(rungs) > 1:  # The first step is alone.
            alone = measure(Setting(own_size, base._replace(**change)))
        found = bound(together) if together.split else None
        rungs.append(Rung(what, together, alone, found))
    return tuple(rungs)
