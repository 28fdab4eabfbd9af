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
from wholebatch.memory.fsdp_sharding import Sharding
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
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        device = next(self.model.parameters()).device
        self._casts = precisions.choose(self.precision, device.type, keeps=self.sharding is None)
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
        totals = self.totals(micro)
        if self.sharding is not None:
            model: Any = self.model  # an FSDPModule
            model.set_requires_gradient_sync(is_last or self.sharding.sync == "every")
        with self._reducing(self.reduces and is_last):
            torch.autograd.backward(totals)

    def end(self) -> None:
        """Run what comes between the last backward and the optimizer's step."""
        self._window.close()
        self._sixteen_bit.round_once()

    def totals(self, micro: Any) -> list[torch.Tensor]:
        """Run a forward; return the totals of its loss."""
        with self._casts.forward():
            result = as_loss(self.loss(self.model, micro))
        return [term.total for term in terms_of(result).values()]

    def _reducing(self, reduces: bool) -> AbstractContextManager[None]:
        if not reduces:
            return nullcontext()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return Buckets(trained, None, send=self.sent).reducing(overlap=True)

    def step(self) -> None:
        """Run the optimizer's step; gradients stay."""
        if self.optimizer is not None:
            with self.around_update():
                self.optimizer.step()

    def clear(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self._sixteen_bit.end()
