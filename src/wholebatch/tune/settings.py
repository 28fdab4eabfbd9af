"""Settings and their results: a way to run, a micro-batch size, and the trial of both."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from wholebatch.core.readable_sizes import PARTS

__all__ = ["PARTS", "Setting", "Trial", "Way", "steps_of"]


class Way(NamedTuple):
    """The way micro-batches run, whatever their size."""

    precision: str
    checkpointing: bool
    execute: str
    sync: str

    def said(self) -> str:
        """Return the way in words.

        >>> Way("bf16", True, "graph", "auto").said()
        'bf16, checkpointed, graph'
        """
        words = [self.precision, *(["checkpointed"] if self.checkpointing else []), self.execute]
        return ", ".join([*words, *([self.sync] if self.sync != "auto" else [])])


@dataclass(frozen=True)
class Setting:
    """One way with one micro-batch size."""

    micro_batch: int
    way: Way

    def said(self) -> str:
        """Return the setting in words.

        >>> Setting(8, Way("full", False, "eager", "auto")).said()
        'micro-batch 8, full, eager'
        """
        return f"micro-batch {self.micro_batch}, {self.way.said()}"


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
        """True if there is a speed to compare."""
        return self.status == "measured"

    def with_(self, **changes: Any) -> Trial:
        """Return a copy with these changes."""
        return replace(self, **changes)

    def in_proportion(self) -> Trial:
        """Return a copy with the split scaled to add up to `seconds`.

        The split was measured in other windows than the timed ones, and other work on the machine
        may have slowed them down.
        """
        taken = sum(self.split.values())
        if not taken or not self.seconds:
            return self
        factor = self.seconds / taken
        return self.with_(split={part: factor * value for part, value in self.split.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the parts of the way beside the rest."""
        data = asdict(self)
        del data["setting"]
        return {"micro_batch": self.setting.micro_batch, **self.setting.way._asdict(), **data}


def steps_of(samples: int, micro_batch: int) -> int:
    """Return the number of micro-batches in a window."""
    return -(-samples // micro_batch)
