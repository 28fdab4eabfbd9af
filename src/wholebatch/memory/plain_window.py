"""A window with nothing but its allocations, for predictions on fake tensors and trial steps.

It allocates what a window of the library allocates, up to a few scalars. Gradients that leave the
device (`wholebatch.offload`) have nowhere to go in a prediction: they are dropped in the same
hooks, and those that come back for the optimizer's step are allocated again, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.distributed.ddp import Buckets, in_buckets
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.memory.fsdp_sharding import Sharding
from wholebatch.memory.zero_stages import FlatSlices
from wholebatch.offload.parameter_buckets import BUCKET_BYTES, bucket_bytes, only
from wholebatch.offload.transfer_to_host import ring_bytes
from wholebatch.window import precision as precisions

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
    gradients: str = "device"
    sharding: Sharding | None = None
    slices: FlatSlices | None = None

    def __post_init__(self) -> None:
        device = next(self.model.parameters()).device
        if self.sharding is not None and not self.sharding.shards_parameters:
            self.sharding = None
        self._casts = precisions.choose(self.precision, device.type, keeps=self.sharding is None)
        self._sixteen_bit = precisions.SixteenBit([self.optimizer] if self.optimizer else [])
        self._offloaded: _OffloadedGradients | None = None
        self.steps_in_backward = self.gradients == "release"
        if self.gradients != "device":
            self._offloaded = _OffloadedGradients(
                self.gradients, self.model, self.optimizer, self.around_update
            )

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

    def make_state(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Make the optimizer's state by one step, with gradients for these parameters."""
        assert self.optimizer is not None
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
        with self.around_update():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

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
            leaving = self._offloaded.backward(last=is_last) if self._offloaded else nullcontext()
            overlaps = self.reduction == "overlap" and is_last
            with self._reducing(overlaps, overlap=True), leaving:
                torch.autograd.backward(totals)
            del totals

    def totals(self, micro: Any) -> list[torch.Tensor]:
        """Run a forward; return the totals of its loss."""
        with self._casts.forward():
            result = as_loss(self.loss(self.model, micro))
        return [term.total for term in terms_of(result).values()]

    def _reducing(self, reduces: bool, *, overlap: bool) -> AbstractContextManager[None]:
        if not reduces:
            return nullcontext()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return Buckets(trained, None, lambda work: None, send=self.sent).reducing(overlap=overlap)

    def step(self) -> None:
        """Run the optimizer's step; gradients stay."""
        if self.optimizer is not None:
            with self.around_update():
                if self.slices is not None:
                    self.slices.step(self.model)
                else:
                    (self._offloaded or self.optimizer).step()

    def clear(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self._sixteen_bit.end()


def held_on_device(gradients: str, model: nn.Module, device: torch.device) -> int:
    """Return the bytes that a way to keep gradients holds on the device all the time."""
    if gradients != "host" or device.type != "cuda":
        return 0
    return ring_bytes(sum(4 * p.numel() for p in model.parameters() if p.requires_grad))


@dataclass(eq=False)
class _OffloadedGradients:
    """The hooks and the optimizer's step of a window whose gradients leave the device."""

    gradients: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    around_update: Callable[[], AbstractContextManager[object]]

    def __post_init__(self) -> None:
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._most = bucket_bytes(self._parameters, BUCKET_BYTES[self.gradients])
        self._ready: list[nn.Parameter] = []
        self._bytes = 0

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Install the hooks around one backward; after the `last` one, gradients are final."""
        made = self._release if self.gradients == "release" else _leave
        if self.gradients == "release" and not last:
            yield
            return
        with ExitStack() as hooks:
            for parameter in self._parameters:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(made))
            yield
            self._flush()

    def _release(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._ready.append(parameter)
        self._bytes += parameter.numel() * parameter.element_size()
        if self._bytes > self._most:
            self._flush()

    def _flush(self) -> None:
        ready, self._ready, self._bytes = self._ready, [], 0
        kept = [getattr(parameter, "grad_dtype", None) for parameter in ready]
        for parameter in ready:
            if parameter.grad is not None and parameter.grad.dtype is not parameter.dtype:
                precisions.round_gradient(parameter)
        if ready and self.optimizer is not None:
            with self.around_update(), only(self.optimizer, ready):
                self.optimizer.step()
        for parameter, dtype in zip(ready, kept, strict=True):
            parameter.grad = None
            parameter.grad_dtype = dtype

    def step(self) -> None:
        """Step all parameters in buckets, with the gradients of one bucket at a time."""
        if self.optimizer is None or self.gradients == "release":
            return
        for bucket in in_buckets(self._parameters, self._most):
            kept = [getattr(parameter, "grad_dtype", None) for parameter in bucket]
            for parameter in bucket:
                parameter.grad_dtype = parameter.dtype  # Sums are rounded to it before the step.
                parameter.grad = torch.empty_like(parameter)
            with only(self.optimizer, bucket):
                self.optimizer.step()
            for parameter, dtype in zip(bucket, kept, strict=True):
                parameter.grad = None
                parameter.grad_dtype = dtype


def _leave(parameter: Tensor) -> None:
    parameter.grad = None
