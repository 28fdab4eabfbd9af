"""Find out what runs in an optimizer's step: torch's own kernel alone, or code of the user's too.

A fused kernel multiplies the gradients by `grad_scale`. Whoever reads `.grad` before it (a step
pre-hook, a subclass, a step that was replaced) would find gradients without the factor. So it is
known here whether anybody may.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from wholebatch.core.forward_state import replaced_attributes


@contextmanager
def stepping(optimizer: torch.optim.Optimizer, remaining: float) -> Iterator[None]:
    """Let `optimizer.step()` multiply the gradients by `remaining` in its own kernel."""
    if remaining == 1.0:
        yield
        return
    device = optimizer.param_groups[0]["params"][0].device
    scale = torch.full((), 1.0 / remaining, dtype=torch.float32, device=device)
    with replaced_attributes(optimizer, grad_scale=scale):
        yield


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer multiplies by a float32 factor in its kernel.

    Code of the user's in the step would read `.grad` without the factor: then it goes in first.
    """
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and is_torchs(optimizer)
        and foreign_code(optimizer) is None
        and all(
            group.get("fused")
            and all(
                parameter.grad is None
                or (parameter.grad.dtype is torch.float32 and type(parameter.grad) is Tensor)
                for parameter in group["params"]
            )
            for group in optimizer.param_groups
        )
    )


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for a class of torch.optim whose step is torch's own."""
    kind: Any = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and all(
        map(_is_torchs_code, _layers(kind.step))
    )


def foreign_code(optimizer: torch.optim.Optimizer) -> str | None:
    """Name what the user has added to the optimizer's step, which may read `.grad`; or None.

    torch's schedulers wrap the step of an optimizer in code of torch's. Hooks of this package know
    where the factor is.
    """
    for where, hooks in (
        ("a step pre-hook", optimizer._optimizer_step_pre_hooks),
        ("a step pre-hook for all optimizers", _global_optimizer_pre_hooks),
    ):
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("wholebatch."):
                return where
    replaced = vars(optimizer).get("step")
    if replaced is not None:
        kind: Any = type(optimizer)
        own = list(_layers(kind.step))
        if not all(layer in own or _is_torchs_code(layer) for layer in _layers(replaced)):
            return "a step() that was replaced"
    return None


def _layers(function: Any) -> Iterator[Any]:
    """Yield the function and all that it wraps, from the outside in."""
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_torchs_code(function: Any) -> bool:
    home = getattr(function, "__globals__", {}).get("__name__", "")
    return str(home).startswith("torch.")
