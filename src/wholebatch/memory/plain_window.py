"""A window with nothing but its allocations, for predictions on fake tensors and trial steps.

It allocates what a window of the library allocates, up to a few scalars. Optimizer state on the
host (`wholebatch.offload`) is created bucket by bucket in the step, and dropped after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from wholebatch.distributed.ddp import Buckets
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.memory.fsdp_sharding import Sharding
from wholebatch.memory.zero_stages import FlatSlices
from wholebatch.offload.partial_step import buckets_of
from wholebatch.offload.streamed_state import only
from wholebatch.window import precision as precisions

_BUCKETS_AT_ONCE = 3
"""Buckets whose state is on the device at once: one arrives, one is stepped, one leaves."""

Reduction: TypeAlias = Literal["overlap", "after"]


@dataclass(eq=False)
class PlainWindow:
    """Forwards and backwards, then the update; nothing is normalised."""

    model: torch.nn.Module
    loss: Callable[[Any, Any], Any]
    optimizer: torch.optim.Optimizer | None = None
    precision: str = "full"
    around_update: Callable[[], AbstractContextManager[object]] = nullcontext
    reduction: Reduction | None = None
    sent: Callable[[torch.Tensor], None] = lambda flat: None
    optimizer_state: str = "device"
    drops_gradients: bool = False
    """True if gradients are dropped after each backward: an engine keeps slices of them."""
    sharding: Sharding | None = None
    slices: FlatSlices | None = None

    def __post_init__(self) -> None:
        device = next(self.model.parameters()).device
        if self.sharding is not None and not self.sharding.shards_parameters:
            self.sharding = None
        self._casts = precisions.choose(self.precision, device.type, keeps=self.sharding is None)
        self._sixteen_bit = precisions.SixteenBit([self.optimizer] if self.optimizer else [])

    def run(self, micros: Sequence[Any]) -> None:
        self.add_all(micros)
        self.step()
        self.clear()

    def add_all(self, micros: Sequence[Any]) -> None:
        """Run everything before the optimizer's step."""
        self._begin()
        self._add(micros)

    def add_last(
        self, micro: Any, *, after_forward: bool, with_gradients: Sequence[torch.nn.Parameter]
    ) -> None:
        """Run the last of several micro-batches alone, in the state that the others leave.

        `with_gradients` have gradients, and casts of weights are kept if there was a forward. The
        backwards before it need no more than the last: they find what it finds, or less.
        """
        self._begin()
        if after_forward:
            self.totals(micro)
        for parameter in with_gradients:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            parameter.grad = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        self._add([micro])

    def _begin(self) -> None:
        self._sixteen_bit.begin()
        self._casts.begin()

    def _add(self, micros: Sequence[Any]) -> None:
        self._add_in_turn(micros)
        with self._reducing(self.reduction == "after", overlap=False):
            pass
        self._casts.end()
        self._sixteen_bit.round_once()

    def _add_in_turn(self, micros: Sequence[Any]) -> None:
        for place, micro in enumerate(micros):
            totals = self.totals(micro)
            is_last = place == len(micros) - 1
            if self.sharding is not None:
                model: Any = self.model  # an FSDPModule
                model.set_requires_gradient_sync(is_last or self.sharding.sync == "every")
            overlaps = self.reduction == "overlap" and is_last
            with self._reducing(overlaps, overlap=True), self._dropping():
                torch.autograd.backward(totals)
            del totals

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Drop each gradient as soon as it is added, if an engine keeps slices of them."""
        with ExitStack() as hooks:
            for parameter in self.model.parameters() if self.drops_gradients else ():
                if parameter.requires_grad:
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(_drop))
            yield

    def totals(self, micro: Any) -> list[torch.Tensor]:
        """Run a forward; return the totals of its loss."""
        with self._casts.forward():
            result = as_loss(self.loss(self.model, micro))
        return [term.total for term in terms_of(result).values()]

    def _reducing(self, reduces: bool, *, overlap: bool) -> AbstractContextManager[None]:
        if not reduces:
            return nullcontext()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return Buckets(trained, None, send=self.sent).reducing(overlap=overlap)

    def step(self) -> None:
        """Run the optimizer's step; gradients stay."""
        if self.optimizer is not None:
            with self.around_update():
                if self.slices is not None:
                    self.slices.step(self.model)
                elif self.optimizer_state == "host":
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


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
