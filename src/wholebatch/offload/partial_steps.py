"""Steps of an optimizer on some of its parameters, which together make one step on all.

Nearly every optimizer treats each parameter by itself, from that parameter's own gradient and
state; stepping them one after the other is then the same update. One that reckons across
parameters (a step size from the norm over all of them) is found by trying it out, and refused.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.gradient_store import refuse_foreign_code
from wholebatch.errors import UnsupportedError

__all__ = ["check_parts", "in_parts", "only"]


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Within it, `optimizer.step()` steps these parameters alone, each with its group's options."""
    mine = {id(parameter) for parameter in parameters}
    found = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in mine]
    try:
        yield
    finally:
        for group, all_of_them in zip(optimizer.param_groups, found, strict=True):
            group["params"] = all_of_them


@contextmanager
def in_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it steps are parts of one: hooks after a step run once, at the end."""
    hooks = optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_post_hooks = hooks
    for hook in list(hooks.values()):
        hook(optimizer, (), {})


def check_parts(optimizers: Sequence[torch.optim.Optimizer], option: str) -> None:
    """Refuse optimizers that cannot step on a part of their parameters, with the reason."""
    refuse_foreign_code(optimizers, option)
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise UnsupportedError(
                f"{option} with {name}(capturable=True): its steps are not recorded as a graph "
                "here; leave capturable out"
            )
        if not type(optimizer).__module__.startswith("torch.optim.") and not _is_parted(optimizer):
            raise UnsupportedError(
                f"{option} with {name}: stepping one parameter after the other made another "
                "update than stepping all at once (it reckons across parameters), or its step "
                "failed on a small example; keep the gradients on the device"
            )


def _is_parted(optimizer: torch.optim.Optimizer) -> bool:
    """Whether two steps in parts end where two steps on all parameters do, on a small example."""
    kind: Any = type(optimizer)
    like: Tensor = optimizer.param_groups[0]["params"][0]

    def trained(*, parted: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(4, 3, generator=generator).to(like.device, like.dtype) * scale)
            for scale in (1.0, 5.0)
        ]
        made: torch.optim.Optimizer = kind(parameters, **optimizer.defaults)
        for _ in range(3):
            gradients = [
                torch.randn(4, 3, generator=generator).to(like.device, like.dtype) * scale
                for scale in (0.1, 10.0)
            ]
            sets = [[parameter] for parameter in parameters] if parted else [parameters]
            for some in sets:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient if any(parameter is one for one in some) else None
                with only(made, some):
                    made.step()
        return [parameter.detach() for parameter in parameters]

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return all(map(torch.equal, trained(parted=False), trained(parted=True)))
    except Exception:  # whatever an unknown optimizer raises, it cannot be shown to be parted
        return False
