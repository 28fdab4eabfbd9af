"""Settings to try: a mode to run in and a micro-batch size, their predicted memory and result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from wholebatch.batch.samples import Static
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.memory.activation_checkpointing import (
    checkpointed,
    is_checkpointed,
    repeated_blocks,
)
from wholebatch.memory.choose_micro_batch import needed, resize_batch
from wholebatch.memory.predict import Prediction, Predictor


class RunMode(NamedTuple):
    """The mode in which micro-batches run, whatever their size."""

    precision: str
    checkpointing: bool
    execute: str
    sync: str
    optimizer_state: str = "device"

    def said(self) -> str:
        """Return the mode in words.

        >>> RunMode("bf16", True, "graph", "auto").said()
        'bf16, checkpointed, graph'
        """
        words = [self.precision, *(["checkpointed"] if self.checkpointing else []), self.execute]
        words += [self.sync] if self.sync != "auto" else []
        words += ["optimizer state on the host"] if self.optimizer_state == "host" else []
        return ", ".join(words)


@dataclass(frozen=True)
class Setting:
    """One mode with one micro-batch size."""

    micro_batch: int
    mode: RunMode

    def said(self) -> str:
        """Return the setting in words.

        >>> Setting(8, RunMode("full", False, "eager", "auto")).said()
        'micro-batch 8, full, eager'
        """
        return f"micro-batch {self.micro_batch}, {self.mode.said()}"


@dataclass(frozen=True)
class Trial:
    """The result of a setting. `status`: measured, stopped, pruned or failed."""

    setting: Setting
    steps: int
    status: str
    why: str
    seconds: float | None = None
    """The seconds of a window, its data included."""
    windows: int = 0
    units_per_second: float | None = None
    peak: int | None = None
    predicted: int | None = None
    split: dict[str, float] = field(default_factory=dict)
    update_bytes: int = 0
    """The bytes of parameters, gradients and optimizer state that a close reads and writes."""
    recommended: bool = False

    @property
    def is_measured(self) -> bool:
        return self.status == "measured"

    def in_proportion(self) -> Trial:
        """Return a copy with the split scaled to add up to `seconds`.

        The split was measured in other windows than the timed ones, and other work on the machine
        may have slowed them down.
        """
        taken = sum(self.split.values())
        if not taken or not self.seconds:
            return self
        factor = self.seconds / taken
        return replace(self, split={part: factor * value for part, value in self.split.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the parts of the mode beside the rest."""
        data = asdict(self)
        del data["setting"]
        return {"micro_batch": self.setting.micro_batch, **self.setting.mode._asdict(), **data}


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


def modes_of(
    model: nn.Module,
    precisions: Sequence[str],
    executes: Sequence[str],
    syncs: Sequence[str],
    checkpointing: Sequence[bool],
) -> list[RunMode]:
    """Return every mode in which this model can run, the first choice of every option first.

    Names that are unknown are refused.
    """
    for name, given, allowed in (
        ("precisions", precisions, ("full", "bf16", "fp16", "fp8")),
        ("executes", executes, ("eager", "compile", "graph")),
        ("syncs", syncs, ("auto", "hold", "every")),
    ):
        for one in given:
            if one not in allowed:
                raise OptionError(f"{name}: {one!r} must be one of {', '.join(allowed)}")
        if not given:
            raise OptionError(f"{name}: must name at least one of {', '.join(allowed)}")
    can = bool(repeated_blocks(model)) and not any(is_checkpointed(m) for m in model.modules())
    return [
        RunMode(precision, again, execute, sync)
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
    made: dict[tuple[str, bool, str, int], Prediction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._predictor = Predictor(self.model, self.loss, optimizer=self.optimizer)
        self.device = self._predictor.device

    def let_go(self) -> None:
        """Stop predicting and drop the model: measurements need the device alone."""
        self.why_not = self.why_not or "measuring has begun"
        del self.model, self.optimizer, self.batch, self._predictor

    def of(self, setting: Setting) -> Prediction | None:
        """Return the prediction for eager execution, used for every `execute` and `sync`."""
        mode = setting.mode
        key = (mode.precision, mode.checkpointing, mode.optimizer_state, setting.micro_batch)
        if key not in self.made and not self.why_not:
            self._predict(key)
        return self.made.get(key)

    def _predict(self, key: tuple[str, bool, str, int]) -> None:
        precision, again, optimizer_state, size = key
        try:
            with checkpointed(self.model) if again else nullcontext():
                self.made[key] = self._predictor.peak(
                    resize_batch(self.batch, size, static=self.static),
                    precision=precision,
                    micro_batches=1 if size == self.samples else 2,
                    optimizer_state=optimizer_state,
                )
        except UnsupportedError as error:
            self.why_not = str(error)

    def need(self, setting: Setting) -> int | None:
        """Return the peak plus the memory that must stay free."""
        found = self.of(setting)
        return None if found is None else needed(found, self.device)

    def fits(self, setting: Setting) -> bool:
        """True if it is predicted to fit, or if nothing is predicted."""
        need = self.need(setting)
        return need is None or need <= self.budget

    def points(self, mode: RunMode) -> list[dict[str, Any]]:
        """Return the predictions for a mode by size, in the form of a plan."""
        found = sorted(
            (size, prediction)
            for (*way, size), prediction in self.made.items()
            if way == [mode.precision, mode.checkpointing, mode.optimizer_state]
        )
        return [
            {
                "micro_batch": size,
                "peak": prediction.peak,
                "by_category": dict(prediction.by_category),
                "fits": self.fits(Setting(size, mode)),
            }
            for size, prediction in found
        ]
