"""The allocations of a window, for predictions on fake tensors and trial steps.

It allocates what a window of the library allocates, up to a few scalars. Optimizer state on the
host (`wholebatch.offload`) is created bucket by bucket in the step, and dropped after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.distributed.ddp import Buckets
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.memory.fsdp_sharding import Sharding
from wholebatch.offload.partial_step import buckets_of
from wholebatch.offload.streamed_state import only
from wholebatch.window import precision as precisions

_BUCKETS_AT_ONCE = 3
"""Buckets whose state is on the device at once: one arrives, one is stepped, one leaves."""


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
    optimizer_state: str = "device"
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        device = next(self.model.parameters()).device
        self._casts = precisions.choose(self.precision, device.type, keeps=self.sharding is None)
        self._sixteen_bit = precisions.SixteenBit([self.optimizer] if self.optimizer else [])

    def run(self, micros: Sequence[Any]) -> None:
        self.begin()
        for place, micro in enumerate(micros):
            self.add(micro, is_last=place == len(micros) - 1)
        self.end()
        self.step()
        self.clear()

    def begin(self) -> None:
        self._sixteen_bit.begin()
        self._casts.begin()

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
        self._casts.end()
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
                if self.optimizer_state == "host":
                    self._step_in_buckets(self.optimizer)
                else:
                    self.optimizer.step()

    def _step_in_buckets(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with the state of one bucket on the device, and of two that are being copied."""
        there: deque[list[torch.nn.Parameter]] = deque()
        for bucket in buckets_of(p for group in optimizer.param_groups for p in group["params"]):
            if len(there) == _BUCKETS_AT_ONCE:
                for parameter in there.popleft():
                    optimizer.state.pop(parameter, None)
            there.append(bucket)
            with only(optimizer, bucket):
                optimizer.step()
        optimizer.state.clear()

    def clear(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self._sixteen_bit.end()
