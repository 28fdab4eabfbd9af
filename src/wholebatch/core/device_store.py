"""Gradients stay in `.grad`, beside the parameters: the plain window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import Closed, DeferredHooks, close_gradients
from wholebatch.core.gradient_store import Store
from wholebatch.core.optimizer_step import stepping
from wholebatch.errors import WindowError
from wholebatch.offload.close_on_device import Ahead, Sums, can_close_ahead, close_ahead

__all__ = ["DeviceStore"]


class DeviceStore(Store):
    """Autograd adds into `.grad`; the close and the optimizer read them there."""

    at_once = True
    steps_on_all = True
    opened: Callable[[], None] | None = None
    """Called when a window opens and no gradient is there yet."""

    def begin(
        self, parameters: list[nn.Parameter], known: Mapping[str, float] | None = None
    ) -> None:
        super().begin(parameters, known)
        self.target.sixteen_bit.begin()
        if self.opened is not None:
            self.opened()

    def close_ahead(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        sums: Sums,
        hooks: DeferredHooks,
        while_waiting: Callable[[], None] | None,
    ) -> Ahead | None:
        target = self.target
        if not self.in_grad:  # gradients, or the state beside them, are not all there at once
            return None
        if self.sync.ranks > 1 or self.sync.grows_own_graph or hooks or target.sixteen_bit:
            return None
        if not can_close_ahead(target.optimizers, self.options, target.device):
            return None
        before = self.before_step()
        try:
            return close_ahead(
                sums,
                groups,
                target.optimizers,
                self.options,
                total_norm=self.sync.total_norm,
                while_waiting=while_waiting,
            )
        except torch.OutOfMemoryError as error:
            failure = str(error)
        self.failed_in_step(before, failure)

    def close(
        self, groups: Sequence[Sequence[nn.Parameter]], normalise: float, hooks: DeferredHooks
    ) -> Closed:
        return close_gradients(
            self.sync.holders(groups),
            self.target.optimizers,
            self.options,
            normalise,
            before_clip=hooks.run if hooks.taken else None,
            on_gradient=hooks.call if hooks.calls else None,
            total_norm=self.sync.total_norm,
            in_place=bool(self.target.sixteen_bit),
        )

    def refuse_nothing(self) -> None:
        if (
            self.sync.ranks == 1
            and not self.sync.grows_own_graph
            and all(p.grad is None for p in self.parameters)
        ):
            raise WindowError(
                "the losses of this window lead to none of the optimizer's parameters, so there is "
                "nothing to update: was the optimizer made for another model, or before its layers "
                "were replaced or copied?"
            )

    def step(self, remaining: float) -> None:
        self.target.sixteen_bit.round_once()
        for optimizer in self.target.optimizers:
            with stepping(optimizer, remaining):
                optimizer.step()

    def check_hand_over(self) -> None:
        if not self.steps_on_all:
            super().check_hand_over()
        if self.sync.owns_step:
            raise WindowError(
                "gradient() with a DeepSpeed engine: it steps its own optimizer; use step()"
            )

    @torch.no_grad()
    def hand_over(self, remaining: float) -> None:
        """Leave the gradients to the user, as `.grad` of the parameters' own dtype.

        They are new tensors: a compiled micro-step writes into the old ones in every window.
        """
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            gradient = gradient.clone() if remaining == 1.0 else gradient * remaining
            if gradient.dtype is not parameter.dtype:  # the sum of a 16-bit one is float32
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
            parameter.grad = gradient.to(parameter.dtype)
        self.parameters = []

    def saved(self) -> list[Tensor | None]:
        return [
            None if parameter.grad is None else parameter.grad.detach().clone()
            for parameter in self.parameters
        ]

    def load(self, saved: Any) -> None:
        for parameter, gradient in zip(self.parameters, saved, strict=True):
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, copy=True)

    def discard(self) -> None:
        super().discard()
        self.target.sixteen_bit.end()
