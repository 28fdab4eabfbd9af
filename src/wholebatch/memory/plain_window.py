"""A window as plain as can be: for predictions on fake tensors, and trial steps on real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch

from wholebatch.core import precision as precisions
from wholebatch.core.loss import Loss, as_loss
from wholebatch.core.noise_scale.gradient_norms import Incoming
from wholebatch.coupled import batchnorms, tracked_instance_norms
from wholebatch.coupled.batchnorm.lock_step import Hold, LockStep
from wholebatch.distributed.ddp import Buckets
from wholebatch.memory.fsdp_sharding import Sharding, reduces_next
from wholebatch.memory.offload_memory import Elsewhere

__all__ = ["PlainWindow", "Reduction"]

Reduction: TypeAlias = Literal["overlap", "after"]


class PlainWindow:
    """A window as plain as can be: forwards and backwards, then the update; nothing is normalised.

    It allocates what a window of the library allocates, up to a few scalars.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        precision: str = "full",
        around_update: Callable[[], AbstractContextManager[object]] = nullcontext,
        lock_step: Hold | None = None,
        reduction: Reduction | None = None,
        sent: Callable[[torch.Tensor], None] = lambda flat: None,
        gradients: str = "device",
        noise: bool = False,
        sharding: Sharding | None = None,
    ) -> None:
        self._model = model
        self._sharding = sharding
        self._lock_step: LockStep | None = None
        if lock_step is not None:
            norms = [*batchnorms(model), *tracked_instance_norms(model)]
            self._lock_step = LockStep(norms, model=model, hold=lock_step)
        self._reduction = reduction
        self._incoming = Incoming() if noise else None
        self._sent = sent
        self._loss = loss
        self._optimizer = optimizer
        self._around_update = around_update
        self._casts = precisions.choose(
            precision, next(model.parameters()).device.type, keeps=sharding is None
        )
        self._sixteen_bit = precisions.SixteenBit([] if optimizer is None else [optimizer])
        self._elsewhere: Elsewhere | None = None
        self.steps_in_backward = gradients == "release"
        if gradients != "device":
            self._elsewhere = Elsewhere(gradients, model, optimizer, around_update)

    def run(self, micros: Sequence[Any]) -> None:
        """Train on these micro-batches once."""
        self.add_all(micros)
        self.step()
        self.clear()

    def add_all(self, micros: Sequence[Any]) -> None:
        """Everything before the optimizer's step."""
        self._begin()
        self._add(micros)

    def add_last(
        self, micro: Any, *, after_forward: bool, with_gradients: Sequence[torch.nn.Parameter]
    ) -> None:
        """The last of several micro-batches alone: where the others have left what they leave.

        These parameters have gradients, and casts of weights are kept if there was a forward. The
        backwards before it take no more than the last: they find what it finds, or less.
        """
        self._begin()
        if after_forward:
            self._forward(micro)
        for parameter in with_gradients:
            dtype = parameter.grad_dtype or parameter.dtype
            parameter.grad = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        self._add([micro])

    def make_state(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """One step with gradients for these parameters, which are dropped again."""
        assert self._optimizer is not None
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
        with self._around_update():
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _begin(self) -> None:
        self._sixteen_bit.begin()
        self._casts.begin()

    def _add(self, micros: Sequence[Any]) -> None:
        if self._lock_step is not None and len(micros) > 1:
            self._lock_step.run(micros, forward=self._forward, backward=self._backward)
            with self._reducing(self._reduction is not None, overlap=False):
                pass
        else:
            overlap = self._reduction == "overlap"
            if self._incoming is not None:
                self._incoming.attach([p for p in self._model.parameters() if p.requires_grad])
            for place, micro in enumerate(micros):
                totals = self._forward(micro)
                is_last = place == len(micros) - 1
                if self._sharding is not None:
                    reduces_next(self._model, is_last or self._sharding.sync == "every")
                with self._reducing(overlap and is_last, overlap=True), self._leaving(is_last):
                    self._backward(totals)
                if self._incoming is not None:
                    self._incoming.take()
                del totals
            if self._incoming is not None:
                self._incoming.detach()
            with self._reducing(self._reduction == "after", overlap=False):
                pass
        self._casts.end()
        self._sixteen_bit.round_once()

    def _forward(self, micro: Any) -> list[torch.Tensor]:
        with self._casts.forward():
            result = as_loss(self._loss(self._model, micro))
        if isinstance(result, Loss):
            return [result.total]
        return [term.total for term in result.by_name.values()]

    def _backward(self, totals: list[torch.Tensor]) -> None:
        torch.autograd.backward(totals)

    def _leaving(self, is_last: bool) -> AbstractContextManager[None]:
        if self._elsewhere is None:
            return nullcontext()
        return self._elsewhere.backward(last=is_last)

    def _reducing(self, reduces: bool, *, overlap: bool) -> AbstractContextManager[None]:
        if not reduces:
            return nullcontext()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        return Buckets(trained, None, lambda work: None, send=self._sent).reducing(overlap=overlap)

    def step(self) -> None:
        """The optimizer's step; gradients stay."""
        if self._optimizer is not None:
            with self._around_update():
                (self._elsewhere or self._optimizer).step()

    def clear(self) -> None:
        """Drop the gradients."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        self._sixteen_bit.end()
