"""A training program as a value: what the grammar draws; script and oracle are made of it.

The first value of every field is the plainest one, so a failure shrinks towards it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.programs.frame import Value

Labels = Literal["all", "some", "one", "none"]
"""How many labels of a micro-batch count."""

WHOLE_BATCH = ("step", "over", "gradient")
"""The ways in that are given a whole batch."""
LOOPS = ("backward", "more", "announce")
"""The ways in whose loop runs the forward pass itself."""
TOKEN_MODELS = ("tokens", "attention", "lstm", "causal")
"""The models that read sequences of token ids, with padding."""
STRUCTURED = ("graph",)
"""The models whose micro-batch is one example: its rows depend on each other."""
NEXT_TOKEN = ("next", "next unlabelled")
"""The losses of `wb.causal_lm`, with labels and without."""
OWN_DATA = ("ce", "smooth", "classes", "weighted", "terms", "coupled", *NEXT_TOKEN)
"""The losses without a `target`: numbers beside the labels."""


@dataclass(frozen=True)
class Micro:
    """A micro-batch: its samples, and how many of their labels count."""

    rows: int
    labels: Labels = "all"


@dataclass(frozen=True, repr=False)
class Program(Value):
    """A training program; `windows` holds the micro-batches of each update."""

    model: str = "linear"
    windows: tuple[tuple[Micro, ...], ...] = ((Micro(2), Micro(2)),)
    loss: str = "ce"
    given: str = "total"
    way: str = "step"
    call: str = "plain"
    """How the loss calls the model: a key of `models.CALLS`."""
    criterion: bool = False
    """True if the loss is a module of torch.nn."""
    numbers: bool = False
    """True if the units are Python numbers."""
    batch: str = "dict"
    joint: bool = False
    """True if a second accumulator trains a judge of the outputs, in the same loop."""
    loader: str = "list"
    """What `over` loops over: a list, a DataLoader of samples or of micro-batches, or a loader that
    reuses its buffers."""
    epochs: int = 1
    loop: str = "over"
    """How the loop of an accumulator says where a window ends."""
    style: str = "module"
    names: str = "short"
    """The names of the batch's fields, and of globals beside them."""
    optimizer: str = "sgd"
    scheduler: str = "none"
    clip: str = "none"
    close: tuple[str, ...] = ()
    """Further fields of `wb.Close` that are given."""
    memory: str = "none"
    tokens: bool = False
    """True if a whole batch is split by `wb.tokens(...)`, which trims padding."""
    counts: bool = False
    """True if `units=` counts the units before the first backward."""
    precision: str = "float64"
    execute: str = "eager"
    """"eager"; "traced", a graph without a compiler; or "compile"."""
    device: str = "cpu"
    event: str = "none"
    at: int = 0
    """The window that the event belongs to."""
    ranks: int = 1
    """Processes; each gets every `ranks`-th micro-batch of a window."""
    sharded: str = "ddp"
    """What holds the model on ranks: "ddp", "fsdp", "hsdp"; or FSDP2 that reduces in "every"
    micro-batch, or whose parameters are "gathered" once per window."""
    mistake: str = "none"
    seed: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the program gives whole batches."""
        return self.way in WHOLE_BATCH

    @property
    def is_random(self) -> bool:
        """True if the model draws random numbers: no two splits give the same update."""
        return self.model == "random" or self.mistake == "negatives drawn"

    @property
    def dealt(self) -> str:
        """The slice of a window that a rank gets: its first or its last rank gets most."""
        is_reversed = self.seed % 2 == 1 and len(self.windows[-1]) >= self.ranks
        return f"{self.ranks - 1} - rank::{self.ranks}" if is_reversed else f"rank::{self.ranks}"

    @property
    def has_tokens(self) -> bool:
        """True if a sample is a sequence of tokens."""
        return self.model in TOKEN_MODELS

    @property
    def micro_batch(self) -> int:
        """The rows of the largest micro-batch: the size that a whole batch is split into."""
        return max(micro.rows for window in self.windows for micro in window)

    @property
    def in_one_row(self) -> bool:
        """True if no window is sure to have two samples with labels that count."""
        sure = {"one": 1, "some": 1, "none": 0}
        return all(
            sum(sure.get(micro.labels, micro.rows) for micro in window) < 2
            for window in self.windows
        )

    @property
    def begins_in_single_rows(self) -> bool:
        """True if no micro-batch of the first window is sure to have two samples with labels."""
        several = (micro.rows > 1 and micro.labels == "all" for micro in self.windows[0])
        return not (self.has_tokens or any(several))

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch, in their order."""
        names = ["x", "mask"] if self.has_tokens else ["x"]
        names += [] if self.loss == "next unlabelled" else ["y"]
        names += ["weight"] if self.loss == "weighted" else []
        names += ["target"] if self.loss not in OWN_DATA else []
        return tuple(names)
