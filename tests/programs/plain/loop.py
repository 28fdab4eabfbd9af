"""A training loop as a value."""

from __future__ import annotations

from dataclasses import dataclass

from tests.programs.frame import Value
from tests.programs.plain.tasks import TASKS, Task


@dataclass(frozen=True, repr=False)
class Loop(Value):
    """A training loop in somebody's own words, right or with one mistake."""

    task: str = "classes"
    shape: str = "modulo"
    """How the loop makes windows of micro-batches."""
    library: str = "torch"
    """Who runs the backward, clips and steps: torch, Accelerate, Fabric or Lightning."""
    form: str = "module"
    """Where the loop stands: in the module, in functions, in a class."""
    divide: str = "steps"
    """What the losses are divided by: a key of `text.DIVISORS`."""
    style: str = "inline"
    """How a loss is divided by the number of micro-batches."""
    steps: int = 4
    """Micro-batches in a full window."""
    windows: int = 2
    """Full windows in an epoch."""
    rows: int = 3
    """Samples in a full micro-batch."""
    extra: int = 0
    """Micro-batches in the short last window of an epoch."""
    missing: int = 0
    """Samples that the last micro-batch of an epoch lacks."""
    epochs: int = 1
    weight: str = ""
    """The loss's own weight."""
    optimizer: str = "sgd"
    scheduler: str = "none"
    clip: str = "none"
    amp: str = "none"
    average: str = "none"
    """How an average of the weights is kept."""
    clear: str = "after"
    """Where gradients are cleared, and how."""
    clears: str = "optimizer.zero_grad()"
    count: str = "accum_steps"
    """How the text names the number of micro-batches."""
    batch: str = "tuple"
    shuffle: bool = False
    noise: tuple[str, ...] = ()
    """Lines that change nothing."""
    ranks: int = 1
    """Processes under DistributedDataParallel; each has every `ranks`-th sample."""
    holds: bool = True
    """True if only the last backward of a window reduces."""
    mistake: str = "none"
    seed: int = 0

    @property
    def has_tail(self) -> bool:
        """True if the last window of an epoch is shorter than the others."""
        return self.extra > 0

    @property
    def is_uneven(self) -> bool:
        """True if the micro-batches of a window have different units."""
        return self.missing > 0 or self.of.is_uneven

    @property
    def samples(self) -> int:
        """The samples of an epoch."""
        return self.rows * (self.steps * self.windows + self.extra) - self.missing

    @property
    def of(self) -> Task:
        """The task: model, data and loss."""
        return TASKS[self.task]
