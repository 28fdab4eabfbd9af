"""The allocations of a window, for predictions on fake tensors and trial steps.

It allocates what a window of the library allocates, up to a few scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.distributed.ddp import Buckets
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.window import precision as precisions


@dataclass(eq=False)
class PlainWindow:
    """Forwards and backwards, then the update; nothing is normalised."""

    model: torch.nn.Module
    loss: Callable[[Any, Any], Any]
    optimizer: torch.optim.Optimizer | None = None
    precision: str = "full"
    around_update: Callable[[], AbstractContextManager[object]] = nullcontext
    reduces: bool = False
    sent: Callable[[torch.Tensor], None] = lambda flat: None

    def __post_init__(self) -> None:
        device = next(self.model.parameters()).device
        self._casts = precisions.choose(self.precision, device.type)
        self._window = ExitStack()
        self._sixteen_bit = precisions.SixteenBit()

    def run(self, micros: Sequence[Any]) -> None:
        self.begin()
        for place, micro in enumerate(micros):
            self.add(micro, is_last=place == len(micros) - 1)
        self.end()
        self.step()
        self.clear()

    def begin(self) -> None:
        groups = self.optimizer.param_groups if self.optimizer else []
        self._sixteen_bit.begin([p for group in groups for p in group["params"]])
        self._window.close()  # of a run that has failed
        self._window.enter_context(self._casts.window())

    def add(self, micro: Any, *, is_last: bool) -> None:
        """Run the forward and backward of a micro-batch."""
        totals = self._totals(micro)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        buckets = Buckets(trained, None, send=self.sent) if self.reduces and is_last else None
        with buckets.reducing(overlap=True) if buckets else nullcontext():
            torch.autograd.backward(totals)

    def _totals(self, micro: Any) -> list[torch.Tensor]:
        """Run a forward; return the totals of its loss, and keep nothing else of it."""
        with self._casts.forward():
            result = as_loss(self.loss(self.model, micro))
        return [term.total for term in terms_of(result).values()]

    def end(self) -> None:
        """Run what comes between the last backward and the optimizer's step."""
        self._window.close()
        self._sixteen_bit.round_once()

    def step(self) -> None:
        """Run the optimizer's step; gradients stay."""
        if self.optimizer is not None:
            with self.around_update():
                self.optimizer.step()

    def clear(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self._sixteen_bit.end()
