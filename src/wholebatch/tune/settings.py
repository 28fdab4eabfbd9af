"""What is tuned: a way to run, the size of its micro-batches, and what was found about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from wholebatch.words import PARTS

__all__ = ["PARTS", "Setting", "Trial", "Way", "steps_of"]


class Way(NamedTuple):
    """How micro-batches run, whatever their size."""

    precision: str
    checkpointing: bool
    execute: str
    sync: str

    def said(self) -> str:
        """
        >>> Way("bf16", True, "graph", "auto").said()
        'bf16, checkpointed, graph'
        """
        words = [self.precision, *(["checkpointed"] if self.checkpointing else []), self.execute]
        return ", ".join([*words, *([self.sync] if self.sync != "auto" else [])])


@dataclass(frozen=True)
class Setting:
    """One way, with one size of micro-batches."""

    micro_batch: int
    way: Way

    def said(self) -> str:
        """
        >>> Setting(8, Way("full", False, "eager", "auto")).said()
        'micro-batch 8, full, eager'
        """
        return f"micro-batch {self.micro_batch}, {self.way.said()}"


@dataclass(frozen=True)
class Trial:
    """What was found about a setting. `status`: measured, stopped, pruned or failed."""

    setting: Setting
    steps: int
    status: str
    why: str
    seconds: float | None = None
    """Of a window, its data included."""
    windows: int = 0
    units_per_second: float | None = None
    peak: int | None = None
    predicted: int | None = None
    split: dict[str, float] = field(default_factory=dict)
    update_bytes: int = 0
    """What the close of a window reads and writes: parameters, gradients, optimizer state."""
    recommended: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether there is a speed to compare."""
        return self.status == "measured"

    def with_(self, **changes: Any) -> Trial:
        """The same with something else in it."""
        return replace(self, **changes)

    def in_proportion(self) -> Trial:
        """With the parts of the split as they are of `seconds`.

        They were looked at in other windows than those that were timed, while the machine may have
        done something else too.
        """
        taken = sum(self.split.values())
        if not taken or not self.seconds:
            return self
        factor = self.seconds / taken
        return self.with_(split={part: factor * value for part, value in self.split.items()})

    def to_dict(self) -> dict[str, Any]:
        """As plain data, the way's parts beside the rest."""
        data = asdict(self)
        del data["setting"]
        return {"micro_batch": self.setting.micro_batch, **self.setting.way._asdict(), **data}


def steps_of(samples: int, micro_batch: int) -> int:
    """Micro-batches in a window."""
    return -(-samples // micro_batch)
