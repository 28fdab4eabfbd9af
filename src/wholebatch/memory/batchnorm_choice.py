"""The choice of `hold` and of the micro-batch size for exact BatchNorm.

All micro-batches are alive at once, so their activations are those of the whole batch. The peak
depends first on what is held of them, and only then on their size (see `runners.lockstep`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from wholebatch.core.splitting import batch_size_of
from wholebatch.core.splitting.samples import Static
from wholebatch.coupled.batchnorm.lock_step import Hold
from wholebatch.coupled.batchnorm.recomputed_blocks import blocks_of
from wholebatch.errors import OptionError
from wholebatch.memory.budget import bytes_said
from wholebatch.memory.choose_micro_batch import Choice, largest_fitting, spare
from wholebatch.memory.predict import Prediction, Predictor
from wholebatch.memory.resized_batches import resize_batch

__all__ = ["choose_in_lock_step"]

_SAID: dict[Hold, str] = {
    "graphs": "in lock-step (exact BatchNorm)",
    "inputs": "in lock-step (exact BatchNorm), blocks computed again",
    "host": "in lock-step (exact BatchNorm), waiting in host memory",
}


def choose_in_lock_step(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    budget: int,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    static: Static = (),
) -> tuple[Choice, Hold]:
    """Return the largest micro-batch that fits, with as much held as possible.

    The whole batch is tried first.
    """
    samples = batch_size_of(batch, static=static)
    predictor = Predictor(model, loss, optimizer=optimizer)
    target = predictor.device
    found: dict[tuple[Hold | None, int], Prediction] = {}

    def at(size: int, hold: Hold | None) -> int:
        """Return the bytes that one size needs; for `host`, those of an ordinary window."""
        if (hold, size) not in found:
            in_lock_step = hold is not None and hold != "host"
            found[hold, size] = predictor.peak(
                resize_batch(batch, size, static=static),
                precision=precision,
                micro_batches=-(-samples // size) if hold is not None else 1,
                lock_step=hold if in_lock_step else None,
            )
        return found[hold, size].peak + spare(found[hold, size], target)

    whole = at(samples, None)
    if whole <= budget or samples == 1:
        prediction = found[None, samples]
        return Choice(samples, prediction, budget, whole <= budget, {samples: whole}), "graphs"
    ways: list[Hold] = ["graphs"]
    ways += ["inputs"] if blocks_of(model) else []
    ways += ["host"] if target.type == "cuda" else []
    least = whole
    for hold in ways:
        tried = {samples: whole}
        size = largest_fitting(
            lambda size, hold=hold: at(size, hold),  # type: ignore[misc]
            budget=budget,
            most=samples - 1,
            tried=tried,
        )
        least = min(least, tried[size])
        if tried[size] <= budget:
            choice = Choice(size, found[hold, size], budget, False, tried)
            return replace(choice, way=_SAID[hold]), hold
    raise OptionError(
        f"memory={bytes_said(budget)}: exact BatchNorm has all {samples} samples of a batch in "
        f"memory, which need {bytes_said(whole)} at once and {bytes_said(least)} in micro-batches; "
        'use a smaller batch, or another batchnorm= ("statistics" keeps one micro-batch at a time)'
    )
