"""The settings to search, and a prediction of which do not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from wholebatch.core.splitting.samples import Static
from wholebatch.errors import UnsupportedError
from wholebatch.memory.activation_checkpointing import (
    checkpointed,
    is_checkpointed,
    repeated_blocks,
)
from wholebatch.memory.choose_micro_batch import resize_batch, spare
from wholebatch.memory.predict import Prediction, predict_peak
from wholebatch.tune.settings import Setting, Way

__all__ = ["Predicted", "sizes_of", "ways_of"]


def sizes_of(samples: int) -> list[int]:
    """Return micro-batch sizes to try: the batch in 1, 2, 4, … even parts, the largest first.

    >>> sizes_of(64), sizes_of(100)
    ([64, 32, 16, 8, 4, 2, 1], [100, 50, 25, 13, 7, 4, 2, 1])
    """
    sizes, steps = [], 1
    while steps < samples:
        sizes.append(-(-samples // steps))
        steps *= 2
    return list(dict.fromkeys([*sizes, 1]))


def ways_of(
    model: nn.Module,
    *,
    precisions: tuple[str, ...],
    executes: tuple[str, ...],
    syncs: tuple[str, ...],
    checkpointing: tuple[bool, ...],
) -> list[Way]:
    """Return every way in which this model can run, the first choice of every option first."""
    can = bool(repeated_blocks(model)) and not any(is_checkpointed(m) for m in model.modules())
    return [
        Way(precision, again, execute, sync)
        for again in checkpointing
        if can or not again
        for sync in syncs
        for execute in executes
        for precision in precisions
    ]


@dataclass
class Predicted:
    """Predicted memory of settings, each predicted once; empty if prediction is impossible."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Any]
    batch: Any
    samples: int
    budget: int
    static: Static = ()
    why_not: str = ""
    """The reason why nothing can be predicted, once it is known."""
    made: dict[tuple[str, bool, int], Prediction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device

    def let_go(self) -> None:
        """Stop predicting and drop the model: measurements need the device alone."""
        self.why_not = self.why_not or "measuring has begun"
        del self.model, self.optimizer, self.batch

    def of(self, setting: Setting) -> Prediction | None:
        """Return the prediction for eager execution: it stands for every `execute` and `sync`."""
        way = setting.way
        key = (way.precision, way.checkpointing, setting.micro_batch)
        if key not in self.made and not self.why_not:
            self._predict(key)
        return self.made.get(key)

    def _predict(self, key: tuple[str, bool, int]) -> None:
        precision, again, size = key
        around: AbstractContextManager[object] = nullcontext()
        if again:
            around = checkpointed(self.model)
        try:
            with around:
                self.made[key] = predict_peak(
                    self.model,
                    self.loss,
                    resize_batch(self.batch, size, static=self.static),
                    optimizer=self.optimizer,
                    precision=precision,
                    micro_batches=1 if size == self.samples else 2,
                )
        except UnsupportedError as error:
            self.why_not = str(error)

    def need(self, setting: Setting) -> int | None:
        """Return the peak plus the memory that must stay free."""
        found = self.of(setting)
        if found is None:
            return None
        return found.peak + spare(found, self.device)

    def fits(self, setting: Setting) -> bool:
        """True if it is predicted to fit, or if nothing is predicted."""
        need = self.need(setting)
        return need is None or need <= self.budget

    def points(self, way: Way) -> list[dict[str, Any]]:
        """Return the predictions for a way by size, in the form of a plan."""
        found = sorted(
            (size, prediction)
            for (precision, again, size), prediction in self.made.items()
            if (precision, again) == (way.precision, way.checkpointing)
        )
        return [
            {
                "micro_batch": size,
                "peak": prediction.peak,
                "by_category": dict(prediction.by_category),
                "fits": self.fits(Setting(size, way)),
            }
            for size, prediction in found
        ]
