"""Optimizer steps on a few parameters at a time, and the optimizers that allow it.

Most optimizers update each parameter from its own gradient and state alone. Stepping them bucket by
bucket makes the same update. An optimizer that computes across parameters, or that counts its calls
of `step()`, is found by a small experiment and refused.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from wholebatch.distributed.ddp import in_buckets
from wholebatch.errors import UnsupportedError
from wholebatch.offload.streamed_state import StreamedState

BUCKET_BYTES = 64 * 2**20
"""The largest bucket, in bytes of its parameters in float32."""
_SMALLEST_BUCKET = 2**18


def buckets_of(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets of one dtype and device.

    A bucket holds at most a sixteenth of them, so that small models save memory too.
    """
    parameters = list(parameters)
    total = sum(p.numel() * max(4, p.element_size()) for p in parameters)
    return in_buckets(parameters, min(BUCKET_BYTES, max(_SMALLEST_BUCKET, total // 16)))


@contextmanager
def post_hooks_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run the optimizer's step post-hooks once at the end, not after every bucket."""
    hooks = optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_post_hooks = hooks
    for hook in list(hooks.values()):
        hook(optimizer, (), {})


def refuse_pre_hooks(optimizer: torch.optim.Optimizer, option: str) -> None:
    """Refuse the user's own code in a step: it would run once per bucket."""
    method = user_code_in_step(optimizer)
    if method is not None:
        raise UnsupportedError(
            f"{option} with {method} on {type(optimizer).__name__}: the optimizer steps on a few "
            "parameters at a time, so it would run several times per update; remove it, or leave "
            f"{option} out"
        )


def check_per_parameter(optimizer: torch.optim.Optimizer, option: str) -> None:
    """Refuse an optimizer whose steps on single parameters differ from one step on all."""
    refuse_pre_hooks(optimizer, option)
    name = type(optimizer).__name__
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise UnsupportedError(
            f"{option} with {name}(capturable=True): a step on a few parameters cannot be part of "
            "a CUDA graph; leave capturable out"
        )
    why = "the updates differ"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if all(map(torch.equal, _trained(optimizer, False), _trained(optimizer, True))):
                return
    except Exception as error:  # an unknown optimizer may raise anything
        why = f"{type(error).__name__}: {error}"
    raise UnsupportedError(
        f"{option} with {name}: on a small example, steps on one parameter after the other did not "
        f"make the update of one step on all ({why}). Only optimizers that update each parameter "
        f"from its own gradient and state can do that; leave {option} out"
    )


def _trained(optimizer: torch.optim.Optimizer, streamed: bool) -> list[Tensor]:
    """Return two small parameters after three steps of an optimizer with the same options."""
    kind: Any = type(optimizer)
    like: Tensor = optimizer.param_groups[0]["params"][0]
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> Tensor:
        return torch.randn(4, 3, generator=generator).to(like.device, like.dtype) * scale

    parameters = [nn.Parameter(random(scale)) for scale in (1.0, 5.0)]
    takes = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in takes}
    trial: torch.optim.Optimizer = kind(parameters, **options)
    state = StreamedState()
    for _ in range(3):
        for parameter, scale in zip(parameters, (0.1, 10.0), strict=True):
            parameter.grad = random(scale)
        if streamed:
            state.step(trial, [[parameter] for parameter in parameters])
        else:
            trial.step()
    return [parameter.detach() for parameter in parameters]


def user_code_in_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Name what the user has added to the optimizer's step, or None.

    torch's schedulers replace the step of an optimizer by code of torch's own.
    """
    for where, hooks in (
        ("a step pre-hook", optimizer._optimizer_step_pre_hooks),
        ("a step pre-hook for all optimizers", _global_optimizer_pre_hooks),
    ):
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("wholebatch."):
                return where
    replaced = vars(optimizer).get("step")
    home = getattr(replaced, "__globals__", {}).get("__name__", "")
    if replaced is not None and not str(home).startswith("torch."):
        return "a step() that was replaced"
    return None
