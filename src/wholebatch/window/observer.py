"""What may watch the windows of a run: five moments, at which it can raise or warn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from wholebatch.losses.loss import Loss, Terms


@dataclass(frozen=True)
class Plan:
    """What is known of a window when it begins."""

    number: int
    """1 for the first window of a run."""
    in_parts: bool
    """True if a micro-batch of the window is not the whole global batch."""
    steps: tuple[int, ...] = ()
    """The numbers of micro-batches that it may have; empty if that is not known before its end."""
    batch: Any = None
    """The whole batch, if it is in hand."""
    micros: Sequence[Any] = ()
    """The micro-batches, if they are in hand."""


class Observer:
    """Sees the five moments of a window. It can raise an error or warn, and changes nothing.

    The window makes the same update, bit for bit, with any observer that lets it pass. This one
    watches nothing.
    """

    def window_begins(self, plan: Plan) -> None:
        """See a window before its first micro-batch."""

    def backward_begins(self) -> None:
        """See the window as the loop or the loss function has left it, before a backward."""

    def loss_is_known(self, loss: Loss | Terms) -> None:
        """See the loss of a micro-batch, or of a part of it, before its backward."""

    def gradients_are_added(self, parameters: Sequence[nn.Parameter]) -> None:
        """See that the gradients of a backward, or of a whole micro-batch, are in.

        No parameters: the window is over, and holds no gradients.
        """

    def window_closes(self) -> None:
        """See that the window is about to close, before anything is reduced or written."""
