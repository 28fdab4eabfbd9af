"""The gradients of a window: where they are added, and how they reach the update.

Autograd adds into `.grad`, and the close and the optimizer read it there. The store of
`wholebatch.offload` steps from another place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wholebatch.distributed import Sync
from wholebatch.errors import WindowError
from wholebatch.window.close import (
    Closed,
    CloseOptions,
    DeferredHooks,
    Sums,
    close_gradients,
    dense_gradients,
    local_parts,
    read_scalars,
    user_code_in_step,
)
from wholebatch.window.forward_state import replaced_attributes
from wholebatch.window.model_and_optimizer import Target, needs_closure

Groups: TypeAlias = Sequence[Sequence[nn.Parameter]]
"""The parameters that are trained, by parameter group."""


class Store:
    """The gradients of an open window in `.grad`, and the update from them."""

    steps_at_once: bool = True
    """True if one step of the optimizer updates all parameters."""
    lends: bool = False
    """Gradients that are left to the user may be written again by the next window."""
    opened: Callable[[], None] | None = None
    """Called when a window opens, before there is a gradient."""
    stray: str = (
        "already holds a gradient that this window did not make, and it would be added. If your "
        "code calls loss.backward(), remove it: the window runs the backward pass. After "
        "gradient(), or if the gradient is from before the loop, call optimizer.zero_grad()"
    )
    """The end of the error message for gradients that are there before the first backward."""

    def __init__(self, target: Target, options: CloseOptions, sync: Sync) -> None:
        self.target = target
        self.options = options
        self.sync = sync
        self.parameters: list[nn.Parameter] = []
        self.is_stepping = False
        self._spoiled: list[tuple[nn.Parameter, int]] = []
        """Parameters of a window that failed in its update, with their versions."""

    # Open window

    def refuse_stray(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse gradients that the window has not made, and would add to."""
        holders = [parameter for parameter in parameters if parameter.grad is not None]
        if not holders:
            return
        dirty = read_scalars([one.any() for one in local_parts(dense_gradients(holders))])
        for parameter, is_dirty in zip(holders, dirty, strict=True):
            if is_dirty:
                raise WindowError(f"{self.target.name_of(parameter)} {self.stray}")
        for parameter in holders:
            parameter.grad = None

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """Begin a window; no parameter may hold a gradient."""
        if any(parameter._version == version for parameter, version in self._spoiled):
            raise WindowError(
                "an earlier window failed when some of its parameters may have been updated: load "
                "the model and the optimizer from the last checkpoint before going on"
            )
        self._spoiled = []
        self.parameters = parameters
        if self.target.sixteen_bit.parameters:
            self.target.sixteen_bit.begin()
        if self.opened is not None:
            self.opened()

    def refuse_nothing(self) -> None:
        """Refuse a window without any gradient."""
        if (
            self.sync.ranks == 1
            and not self.sync.grows_own_graph
            and all(p.grad is None for p in self.sync.stepped(self.parameters))
        ):
            raise WindowError(
                "the losses of this window lead to none of the optimizer's parameters, so there is "
                "nothing to update: was the optimizer made for another model, or before its layers "
                "were replaced or copied?"
            )

    # Close

    def can_step_unread(self, hooks: DeferredHooks) -> bool:
        """True if the optimizers read from a tensor (`found_inf`) whether to step."""
        return (
            self.steps_at_once
            and self.sync.ranks == 1
            and not self.sync.grows_own_graph
            and not hooks
            and not self.target.sixteen_bit.parameters
            and self.target.device.type in _DEVICES_TO_WAIT_FOR
            and not _global_optimizer_pre_hooks
            and not _global_optimizer_post_hooks
            and all(map(_steps_by_found_inf, self.target.optimizers))
        )

    def close(self, groups: Groups, sums: Sums, hooks: DeferredHooks, *, waits: bool) -> Closed:
        """Normalise and clip the gradients for the optimizer (see `close_gradients`)."""
        holders, total_norm = self.sync.holders(groups), self.sync.total_norm
        return close_gradients(
            holders, sums, self.options, hooks, total_norm=total_norm, waits=waits
        )

    def check_hand_over(self) -> None:
        """Refuse to leave the gradients to the user if a step of theirs could not use them."""
        if self.sync.owns_step:
            raise WindowError(
                "gradient() with a DeepSpeed engine: it steps its own optimizer; use step()"
            )

    @torch.no_grad()
    def hand_over(self) -> None:
        """Leave the gradients to the user, in `.grad` and in the parameters' own dtype.

        They are new tensors, unless this store `lends` its own: a compiled micro-step writes into
        those in every window.
        """
        self.target.sixteen_bit.round_once()
        for parameter in () if self.lends else self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self.parameters = []

    # Update

    def update(self, found_inf: Tensor | None = None) -> None:
        """Step the optimizers; if memory runs out, raise an error that says what to do.

        Optimizers that read `found_inf` on the device change nothing if it is 1.
        """
        self.is_stepping = True
        try:
            self.step(found_inf)
            return
        except torch.OutOfMemoryError as error:
            failure = str(error)  # the text only: a traceback keeps what was allocated alive
        finally:
            self.is_stepping = False
        self._spoil(failure)

    def step(self, found_inf: Tensor | None) -> None:
        """Step every optimizer once."""
        if self.target.sixteen_bit.parameters:
            self.target.sixteen_bit.round_once()
        for optimizer in self.target.optimizers:
            if found_inf is None:
                _step_without_closure(optimizer)
                continue
            with replaced_attributes(optimizer, found_inf=found_inf):
                optimizer.step()

    def _spoil(self, failure: str) -> NoReturn:
        """Mark the parameters as half updated, and say so."""
        self._spoiled = [(parameter, parameter._version) for parameter in self.parameters]
        reason = failure.strip().partition("\n")[0] or "no reason given"
        raise torch.OutOfMemoryError(
            f"the optimizer's step ran out of memory ({reason}), and may have changed parameters "
            "or optimizer state already: load the model and the optimizer from the last "
            "checkpoint before going on. fused=True makes no copies of the gradients, "
            'wb.Memory(optimizer_state="host") keeps the state in host memory, and a smaller '
            "micro-batch leaves more free memory"
        )

    def discard(self) -> None:
        """End the window and release its gradients."""
        for parameter in (*self.parameters, *self.sync.stepped(self.parameters)):
            parameter.grad = None
        self.parameters = []
        if self.target.sixteen_bit.parameters:
            self.target.sixteen_bit.end()


def _step_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer; say what to do with one that needs a closure, such as SAM."""
    try:
        optimizer.step()
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        text = str(error)
        if "closure" in text or "'NoneType' object is not callable" in text:
            raise needs_closure(optimizer) from error
        raise


_DEVICES_TO_WAIT_FOR = ("cuda",)


def _steps_by_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """True for a fused Adam or SGD: where `found_inf` is 1, it leaves all as it is.

    The first step of an SGD with momentum would leave its new buffers without a value.
    """
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        and type(optimizer.param_groups[0]["params"][0].data) is Tensor  # not a shard
        and all(group.get("fused") for group in optimizer.param_groups)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and user_code_in_step(optimizer) is None
        and all(
            optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
            for group in optimizer.param_groups
            if group.get("momentum")
            for parameter in group["params"]
            if parameter.grad is not None
        )
    )
