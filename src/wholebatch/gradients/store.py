"""Where the gradients of a window go as they are made, and how they reach the update.

A window asks its store, and nothing else, where a micro-batch's gradient goes and where the close
finds it. Which memory a window needs beside parameters, activations and optimizer state is the
store's affair alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from wholebatch.close import Closed, CloseOptions
from wholebatch.errors import WindowError
from wholebatch.gradients.ahead import Ahead, Sums
from wholebatch.hooks import DeferredHooks
from wholebatch.sync import Sync

if TYPE_CHECKING:
    from wholebatch.target import Target

__all__ = ["Store", "refuse_stray"]


class Store(ABC):
    """One way to keep the gradients of an open window, and to make the update from them."""

    in_grad: bool = True
    """Whether they are in `.grad`, where a last backward may reduce them over the ranks."""

    only_eager: str | None = None
    """Why no compiled graph may run a micro-step; None where one may."""

    counts_first: bool = False
    """Whether the units of a window must be known before its first backward."""

    approximate: str | None = None
    """How the update differs from that of the undivided batch; None: it does not."""

    def __init__(self, target: Target, options: CloseOptions, sync: Sync) -> None:
        self.target = target
        self.options = options
        self.sync = sync
        self.parameters: list[nn.Parameter] = []
        self.is_last = False  # whether the backward that runs now is the window's last

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """A window opens; none of these parameters holds a gradient."""
        self.parameters = parameters

    def backward_made(self) -> None:
        """A backward is over, and every gradient that it makes is made."""
        return

    def reduce_now(self) -> None:
        """The close begins, and no backward has reduced what is in `.grad`."""
        if self.in_grad:
            self.sync.reduce_now(self.parameters)

    def absent(self) -> set[int]:
        """Parameters, by id, for which this rank has made no gradient."""
        return self.sync.filled_in()

    def drop(self, parameter: nn.Parameter) -> None:
        """No rank has made a gradient for it: it is to have none."""
        parameter.grad = None

    def close_ahead(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        sums: Sums,
        hooks: DeferredHooks,
        while_waiting: Callable[[], None] | None,
    ) -> Ahead | None:
        """The whole close on the device, read afterwards; None where the host must decide."""
        return None

    @abstractmethod
    def close(
        self, groups: Sequence[Sequence[nn.Parameter]], normalise: float, hooks: DeferredHooks
    ) -> Closed:
        """Bring the gradients to what the optimizer must see."""

    @abstractmethod
    def step(self, remaining: float) -> None:
        """One step of every optimizer; `remaining` is what the gradients are still to get."""

    @abstractmethod
    def saved(self) -> Any:
        """What an open window holds, for a checkpoint."""

    @abstractmethod
    def load(self, saved: Any) -> None:
        """Put `saved` into a window that has just been opened."""

    def discard(self) -> None:
        """The window is over: let go of what it holds."""
        for parameter in self.parameters:
            parameter.grad = None
        self.parameters = []
        self.is_last = False


def refuse_stray(target: Target) -> None:
    """Refuse gradients that the window would add to although it has not made them."""
    for group in target.groups():
        for parameter in group:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse or bool(gradient.any()):
                raise WindowError(
                    f"{target.name_of(parameter)} already holds a gradient that this window did "
                    "not make, and it would be added in: call optimizer.zero_grad() first, or "
                    "give that loss to the window too (backward(..., more=True))"
                )
            parameter.grad = None
