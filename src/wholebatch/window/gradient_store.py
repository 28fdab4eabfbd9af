"""Gradient stores: where a window's gradients go as they are made, and how they reach the update.

A window asks its store, and nothing else, where a micro-batch's gradient goes and where the close
finds it. `DeviceStore` is the plain one; those of `wholebatch.offload` need less memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wholebatch.distributed import Sync
from wholebatch.errors import WindowError
from wholebatch.window.close import (
    Closed,
    CloseOptions,
    DeferredHooks,
    close_ahead,
    close_gradients,
    dense_gradients,
    read_scalars,
    stepping,
    takes_grad_scale,
)

if TYPE_CHECKING:
    from wholebatch.window.model_and_optimizer import Target
    from wholebatch.window.window import OpenWindow


class Store(ABC):
    """One way to keep the gradients of an open window, and to make the update from them."""

    only_eager: str | None = None
    """The reason why no compiled graph may run a micro-step; None if one may."""

    takes_buffers: bool = False
    """True if eager code may add into the gradient buffers of graphs from the start."""

    after_failure: str = (
        "parameters and optimizer state are as before this window; pass "
        "close=wb.Close(nonfinite='skip') to skip and count such updates"
    )
    """The end of the error message for gradients that are not finite."""

    stray: str = (
        "already holds a gradient that this window did not make, and it would be added in. If your "
        "code calls loss.backward(), remove it: the window makes the backward. After gradient(), "
        "and for a gradient from before the loop, call optimizer.zero_grad()"
    )
    """The end of the error message for gradients that are there before the first backward."""

    def __init__(self, target: Target, options: CloseOptions, sync: Sync) -> None:
        self.target = target
        self.options = options
        self.sync = sync
        self.parameters: list[nn.Parameter] = []
        self.spoiled: list[tuple[nn.Parameter, int]] = []
        """Parameters of a window that failed in its update, with their versions."""
        self.dropped: set[int] = set()
        """Ids of parameters for which no rank has made a gradient."""

    # Open window

    def refuse_stray(self) -> None:
        """Refuse gradients that the window has not made, and would add to."""
        holders = [p for p in self.target.trained() if p.grad is not None]
        local = [getattr(one, "_local_tensor", one) for one in dense_gradients(holders)]
        dirty = read_scalars([gradient.any() for gradient in local])
        for parameter, is_dirty in zip(holders, dirty, strict=True):
            if is_dirty:
                raise WindowError(f"{self.target.name_of(parameter)} {self.stray}")
        for parameter in holders:
            parameter.grad = None

    def begin(self, window: OpenWindow) -> None:
        """Begin a window, none of whose parameters holds a gradient."""
        if any(parameter._version == version for parameter, version in self.spoiled):
            raise WindowError(
                "an earlier window failed after some of its parameters had been updated, or may "
                "have been: load the model and the optimizer from the last checkpoint before going "
                "on"
            )
        self.spoiled = []
        self.dropped = set()
        self.parameters = window.inputs

    def backward_made(self) -> None:
        """Take note that a backward is over."""
        return

    # Close

    def reduce_now(self) -> None:
        """Reduce what is in `.grad` over the ranks: no backward has."""
        self.sync.reduce_now(self.parameters)

    def absent(self) -> set[int]:
        """Return the ids of the parameters for which this rank has made no gradient."""
        return self.sync.filled_in()

    def drop(self, parameter: nn.Parameter) -> None:
        """Drop a parameter's gradient: no rank has made one."""
        parameter.grad = None
        self.dropped.add(id(parameter))

    def refuse_nothing(self) -> None:
        """Refuse a window that has made no gradient at all, if the store can tell."""
        return

    def close_ahead(
        self, window: OpenWindow, hooks: DeferredHooks, while_waiting: Callable[[], object] | None
    ) -> Closed | None:
        """Close on the device and read the numbers later; None if the host must decide."""
        return None

    @abstractmethod
    def close(self, window: OpenWindow, normalise: float, hooks: DeferredHooks) -> Closed:
        """Bring the gradients to what the optimizer must see."""

    def check_hand_over(self) -> None:
        """Refuse to leave the gradients to the user if a step of theirs could not use them."""
        return

    @abstractmethod
    def hand_over(self, remaining: float) -> None:
        """Leave the gradients times `remaining` in `.grad`, to the user."""

    # Update

    def update(self, remaining: float) -> None:
        """Step the optimizers; if memory runs out, refuse to go on with what is left."""
        try:
            self.step(remaining)
            return
        except torch.OutOfMemoryError as error:
            failure = str(error)  # the text only: a traceback keeps what was allocated alive
        self._spoil(failure)

    @abstractmethod
    def step(self, remaining: float) -> None:
        """Step every optimizer once; the gradients are still to be multiplied by `remaining`."""

    def _spoil(self, failure: str) -> NoReturn:
        """Mark the parameters as half updated, and say so."""
        self.spoiled = [(parameter, parameter._version) for parameter in self.parameters]
        reason = failure.strip().partition("\n")[0] or "no reason given"
        raise torch.OutOfMemoryError(
            f"the optimizer's step ran out of memory ({reason}), and may have changed parameters "
            "or optimizer state already: load the model and the optimizer from the last checkpoint "
            "before going on. fused=True makes no copies of the gradients, "
            'wb.Memory(optimizer_state="host") keeps the state off the device, and a smaller '
            "micro-batch leaves less scattered memory"
        )

    def discard(self) -> None:
        """End the window and release its gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self.parameters = []


class DeviceStore(Store):
    """Autograd adds into `.grad`; the close and the optimizer read it there."""

    takes_buffers = True
    closes_ahead: bool = True
    """True if gradients and optimizer state are all there at the close, and nobody reads them."""
    lends = False
    """Gradients that are left to the user may be written again by the next window."""
    opened: Callable[[], None] | None = None
    """Called when a window opens, before there is a gradient."""

    def begin(self, window: OpenWindow) -> None:
        super().begin(window)
        if self.target.sixteen_bit.parameters:
            self.target.sixteen_bit.begin()
        if self.opened is not None:
            self.opened()

    def close_ahead(
        self, window: OpenWindow, hooks: DeferredHooks, while_waiting: Callable[[], object] | None
    ) -> Closed | None:
        target = self.target
        if (
            not self.closes_ahead
            or self.sync.ranks > 1
            or self.sync.grows_own_graph
            or hooks
            or target.sixteen_bit.parameters
        ):
            return None
        device = window.inputs[0].device
        if not can_close_ahead(target.optimizers, self.options, device):
            return None
        try:
            return close_ahead(
                window,
                target.optimizers,
                self.options,
                total_norm=self.sync.total_norm,
                while_waiting=while_waiting,
            )
        except torch.OutOfMemoryError as error:
            failure = str(error)
        self._spoil(failure)

    def close(self, window: OpenWindow, normalise: float, hooks: DeferredHooks) -> Closed:
        return close_gradients(
            self.sync.holders(window.groups),
            self.target.optimizers,
            self.options,
            normalise,
            hooks,
            total_norm=self.sync.total_norm,
            in_place=bool(self.target.sixteen_bit.parameters),
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
        if self.target.sixteen_bit.parameters:
            self.target.sixteen_bit.round_once()
        for optimizer in self.target.optimizers:
            with stepping(optimizer, remaining):
                optimizer.step()

    def check_hand_over(self) -> None:
        if self.sync.owns_step:
            raise WindowError(
                "gradient() with a DeepSpeed engine: it steps its own optimizer; use step()"
            )

    @torch.no_grad()
    def hand_over(self, remaining: float) -> None:
        """Leave the gradients to the user, in `.grad` and in the parameters' own dtype.

        They are new tensors, unless this store `lends` its own: a compiled micro-step writes into
        those in every window. The fp32 sum of a 16-bit parameter is left as it is where the
        optimizer takes it.
        """
        sixteen_bit = self.target.sixteen_bit
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if self.lends:
                gradient = gradient if remaining == 1.0 else gradient.mul_(remaining)
            else:
                gradient = gradient.clone() if remaining == 1.0 else gradient * remaining
            rounds = not self.target.steps or sixteen_bit.rounds(parameter)
            if gradient.dtype is not parameter.dtype and rounds:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
                gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient
        self.parameters = []

    def discard(self) -> None:
        super().discard()
        if self.target.sixteen_bit.parameters:
            self.target.sixteen_bit.end()


_STEPS_ON_DEVICE = (torch.optim.Adam, torch.optim.AdamW)
"""Fused, these leave parameters and state as they were where `found_inf` says so."""


def can_close_ahead(
    optimizers: Sequence[torch.optim.Optimizer], options: CloseOptions, device: torch.device
) -> bool:
    """True if the device can make the whole close without the host."""
    return (
        device.type == "cuda"
        and options.clip_value is None
        and not isinstance(options.clip_norm, Sequence)
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
        and all(
            type(optimizer) in _STEPS_ON_DEVICE
            and not optimizer._optimizer_step_pre_hooks
            and not optimizer._optimizer_step_post_hooks
            and takes_grad_scale(optimizer)
            for optimizer in optimizers
        )
    )
