"""Detect writes to an open window that are not its own.

A loop that is changed by one line keeps its other lines: an `optimizer.zero_grad()` at its top
drops what the window has summed so far, an `optimizer.step()` updates from a part of it, and a
plain `loss.backward()` adds what the window does not count. None of them raises an error, so they
are searched for between two backwards: every in-place write changes a tensor's version, which costs
nothing to read. Writes to `.data`, and those of `scaler.unscale_`, do not change it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn

from wholebatch.distributed.ddp import Replicated
from wholebatch.errors import WindowError
from wholebatch.warn_user import warn_user
from wholebatch.window.ledger import Ledger
from wholebatch.window.model_and_optimizer import Target

_gradient = operator.attrgetter("grad")
_version = operator.attrgetter("_version")
_state = operator.attrgetter("_version", "requires_grad")


class ForeignWrites:
    """Refuses gradients, parameters and learning rates that others have written in a window."""

    def __init__(self, target: Target) -> None:
        self._target = target
        # Elsewhere gradients are not in `.grad` between two backwards, or the engine moves them.
        self._looks = target.sync.adds_to_parameters
        self.forget()

    def forget(self) -> None:
        """Forget the window: it is over, or another one begins."""
        self._parameters: Sequence[nn.Parameter] = ()
        self._gradients: list[Tensor | None] = []  # held: no other tensor gets the id of one
        self._writes: list[int] = []  # into each gradient
        self._states: list[tuple[int, bool]] = []
        self._rates: list[tuple[float, int]] = []  # at the first backward

    def remember(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remember the parameters and their gradients after a backward of the window."""
        if not parameters:
            self.forget()
            return
        if self._looks:
            self._parameters = parameters
            self._gradients = list(map(_gradient, parameters))
            self._writes = _writes_into(self._gradients)
            self._states = list(map(_state, parameters))
        self._rates = self._rates or self._rates_now()

    def check(self) -> None:
        """Refuse to go on with a window that is no longer what its backwards made."""
        gradients = list(map(_gradient, self._parameters))
        writes, states = _writes_into(gradients), list(map(_state, self._parameters))
        are_same = all(map(operator.is_, gradients, self._gradients))
        if are_same and writes == self._writes and states == self._states:
            return
        for place, parameter in enumerate(self._parameters):
            is_kept = gradients[place] is self._gradients[place]
            if not states[place][1]:
                why = "{} was frozen in the middle of the window: freeze it between windows"
            elif not is_kept or writes[place] != self._writes[place]:
                why = (
                    "the gradient of {} has changed since the window's last backward. The window "
                    "computes the gradients and makes the update: remove zero_grad(), "
                    "loss.backward(), optimizer.step() and gradient clipping (clip_norm= clips)"
                )
            elif states[place] != self._states[place]:
                why = (
                    "{} has changed in the middle of the window. The window's last backward makes "
                    "the update: remove optimizer.step(), and what else writes into it"
                )
            else:
                continue
            name = self._target.name_of(parameter)
            raise WindowError(f"{why.format(name)}; discard() drops what this window holds")

    def check_rates(self) -> None:
        """Refuse a learning rate that has changed since the window's first backward."""
        if self._rates and self._rates != self._rates_now():
            raise WindowError(
                "the learning rate changed in the middle of a window, and only its value at the "
                "update counts: step the scheduler once per update (scheduler= does), not once per "
                "micro-batch"
            )

    def _rates_now(self) -> list[tuple[float, int]]:
        """Return the rates; of one in a tensor, which may be on a device, how often it was set."""
        groups = [group for each in self._target.optimizers for group in each.param_groups]
        rates = [group["lr"] for group in groups if "lr" in group]
        return [(0.0, rate._version) if isinstance(rate, Tensor) else (rate, 0) for rate in rates]


def _writes_into(gradients: Sequence[Tensor | None]) -> list[int]:
    """Return how often each gradient was written into; -1 where there is none."""
    try:
        return list(map(_version, gradients))
    except AttributeError:  # one is None
        return [-1 if gradient is None else gradient._version for gradient in gradients]


def refuse_unreduced_steps(ledger: Ledger) -> None:
    """Refuse a step of the user's own on gradients that the window holds back from reduction.

    While a window exists, DDP's own reduction is off: a plain `loss.backward()` beside it makes the
    gradient of one rank, and a step with it lets the models of the ranks drift apart.
    """
    if not isinstance(ledger.sync, Replicated) or ledger.sync.ranks == 1:
        return
    holder = ref(ledger)

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        ledger = holder()
        if ledger is None or ledger.leaves_gradients or ledger.open is not None:
            return  # the window's own step, or one that the window refuses itself
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise WindowError(
                "optimizer.step() outside of a window, on a DistributedDataParallel model whose "
                "reduction is off as long as its Accumulator or WholeBatch exists: these gradients "
                "are those of one rank. Give the losses to backward() or step() of wholebatch, or "
                "delete its object before a plain loop"
            )

    for optimizer in ledger.target.optimizers:
        finalize(ledger, optimizer.register_step_pre_hook(refuse).remove)


def warn_of_empty_steps(owner: object, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of a `step()` of these optimizers without any gradient, as long as `owner` lives.

    A loop that kept the lines after its backward calls it after the window has made its update,
    and the clipping before it has had no effect.
    """

    def warn(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        if not has_closure and all(gradient is None for gradient in gradients):
            warn_user(
                "optimizer.step() found no gradients: the window's last backward has made the "
                "update. Remove optimizer.step(), optimizer.zero_grad() and gradient clipping "
                "from the loop, which have no effect there; clip_norm= clips"
            )

    for optimizer in optimizers:
        finalize(owner, optimizer.register_step_pre_hook(warn).remove)
