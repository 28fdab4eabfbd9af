"""A forward compiled by torch.compile over ordinary autograd, where one joint graph is impossible.

torch.compile inspects the model's Python at every call and compiles the parts between graph breaks.
So it supports hooks, side effects and checkpointing with dropout, and still fuses most of the work.
Autograd adds the gradients, and every micro-batch casts the weights again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wholebatch.compile.messages import CannotTrace, first_line
from wholebatch.core.forward_state import ForwardState
from wholebatch.core.loss import Loss, Terms

if TYPE_CHECKING:
    from wholebatch.core.window import Window

__all__ = ["CompiledForward"]


class CompiledForward:
    """Micro-steps with a compiled forward. Raises CannotTrace if the first call fails."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        window: Window,
        eager: Callable[[Any, Callable[[Any, Any], Any]], Loss | Terms],
    ) -> None:
        self._model = model
        self._window = window
        self._eager = eager
        self._loss: Callable[[Any, Any], Any] = torch.compile(loss)
        self._proven = False

    def __call__(self, micro: Any) -> None:
        if self._proven:
            self._eager(micro, self._loss)
            return
        before = ForwardState(self._model)
        entered = len(self._window.owners)
        try:
            self._eager(micro, self._loss)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # A compiler may raise anything.
            if self._window.broken or len(self._window.owners) != entered:
                # It failed after the backward began: some of its gradients are already added.
                raise
            before.restore()
            raise CannotTrace(f"{type(problem).__name__}: {first_line(problem)}") from problem
        self._proven = True
