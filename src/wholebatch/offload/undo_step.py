"""An optimizer's step that runs out of memory: nothing of it is left, or it is said what is.

An optimizer makes its state in its first step, one parameter after the other, and many need copies
of the gradients in every step. Where memory runs out on the way, half of a parameter's state may be
there, and torch's Adam would fail on it for ever after. What a step has made is taken away again.
What it has changed in place cannot be put back; but torch counts such changes, so it can be told.

Fused kernels change parameters without counting. Adam and Adagrad count their steps just before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Before", "Left"]


@dataclass(frozen=True)
class Left:
    """What a failed step has left behind."""

    changed: int
    """Parameters that it had changed already."""
    unknown: bool
    """Whether it may have changed others, or state that was there before."""


class Before:
    """What a step finds: as little as it takes to tell afterwards whether it has begun.

    An optimizer begins with the first parameter of a group. Where not all are stepped `at_once`,
    but in parts and in an order of their own, the state of every one is looked at.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[nn.Parameter],
        *,
        at_once: bool,
    ) -> None:
        self._optimizers = optimizers
        self._parameters = parameters
        self._versions = [parameter._version for parameter in parameters]
        self._states = [len(optimizer.state) for optimizer in optimizers]
        self._there = [
            (tensor, tensor._version)
            for optimizer in optimizers
            if optimizer.state
            for tensor in _tensors(
                _first_states(optimizer) if at_once else optimizer.state.values()
            )
        ]

    def undo(self) -> Left:
        """Take away the state that the step has made; what is left of it nevertheless."""
        changed = sum(
            parameter._version != version
            for parameter, version in zip(self._parameters, self._versions, strict=True)
        )
        unknown = any(tensor._version != version for tensor, version in self._there)
        for optimizer, there in zip(self._optimizers, self._states, strict=True):
            # A dictionary keeps the order of insertion: what the step has made comes last.
            made = [optimizer.state.pop(key) for key in [*optimizer.state][there:]]
            unknown = unknown or self._may_have_begun(optimizer, made, has_older=there > 0)
        return Left(changed, unknown)

    def _may_have_begun(
        self, optimizer: torch.optim.Optimizer, made: list[dict[str, Any]], *, has_older: bool
    ) -> bool:
        """Whether it may have changed something although no change was counted."""
        if not type(optimizer).__module__.startswith("torch.optim."):
            return True  # what it counts, and what else it keeps, is not known
        groups = optimizer.param_groups
        if has_older and any(len(_kinds([group])) > 1 for group in groups):
            return True  # it may have begun with any of these kinds
        if torch._C._len_torch_dispatch_stack() and any(
            group.get("foreach", False) is not False for group in groups
        ):
            return True  # below a dispatch mode, such as a meter, foreach operations do not count
        if not any(group.get("fused") for group in groups):
            return False
        if isinstance(optimizer, torch.optim.SGD):
            # Momentum is made before its only kernel, and kept after it.
            alone = len(self._optimizers) == len(_kinds(groups)) == len(groups) == 1
            return has_older or not alone or not made or any(made)
        return any(tensor._version > 0 for tensor in _tensors(made))


def _first_states(optimizer: torch.optim.Optimizer) -> Iterator[Mapping[str, Any]]:
    """Of each group, the state of the first parameter that has a gradient, if there is any."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                if parameter in optimizer.state:
                    yield optimizer.state[parameter]
                break


def _tensors(states: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    for state in states:
        for value in state.values():
            if isinstance(value, Tensor):
                yield value


def _kinds(groups: Iterable[Mapping[str, Any]]) -> set[tuple[torch.device, torch.dtype]]:
    """Parameters of one device and dtype are what an optimizer steps with one call."""
    return {(p.device, p.dtype) for group in groups for p in group["params"]}
