"""Parameters in buckets: their memory as one row, and optimizer steps on one bucket at a time.

Nearly every optimizer treats each parameter by itself, from that parameter's own gradient and
state, so stepping them one after the other makes the same update. An optimizer that computes
across parameters (a step size from the norm over all of them) is found by a small experiment, and
refused.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wholebatch.core.gradient_store import refuse_foreign_code
from wholebatch.distributed import Sync
from wholebatch.errors import UnsupportedError

BUCKET_BYTES = {
    "host": 64 * 2**20,
    "swap": 64 * 2**20,
    "moments": 64 * 2**20,
    "release": 32 * 2**20,
}
"""The largest bucket, by the place of the gradients."""
_SMALLEST_BUCKET = 2**18

T = TypeVar("T")
S = TypeVar("S")

# Buckets


def bucket_bytes(parameters: Iterable[Tensor], most: int) -> int:
    """Return the size of a bucket: a sixteenth of all gradients, so that small models gain too."""
    total = sum(p.numel() * max(4, p.element_size()) for p in parameters)
    return min(most, max(_SMALLEST_BUCKET, total // 16))


def dtype_and_device(parameter: nn.Parameter) -> Hashable:
    """Return what the parameters of a bucket have in common."""
    return parameter.dtype, parameter.device


def in_buckets(
    parameters: Iterable[nn.Parameter],
    most: int,
    kind: Callable[[nn.Parameter], Hashable] = dtype_and_device,
) -> list[list[nn.Parameter]]:
    """Put neighbours of one kind together, up to `most` bytes of their sums."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[Hashable, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        size = parameter.numel() * max(4, parameter.element_size())
        bucket, filled = filling.get(kind(parameter), ([], 0))
        if not bucket or filled + size > most:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind(parameter)] = bucket, filled + size
    return buckets


def one_ahead(items: Iterable[T], start: Callable[[T], S]) -> Iterator[S]:
    """Yield `start(item)` for each item, with the next one started already.

    Two are alive at most, if the caller deletes what it was given before it asks for the next.
    """
    started: deque[S] = deque()
    for item in items:
        started.append(start(item))
        if len(started) == 2:
            yield started.popleft()
    while started:
        yield started.popleft()


# Memory


def in_shape_of(parameter: Tensor, flat: Tensor) -> Tensor:
    """View a row in the shape of the parameter, in the parameter's order of memory."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride())


def flat_of(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient as one row, in the parameter's order of memory."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return gradient.reshape(-1)
    if gradient.stride() != parameter.stride():
        ordered = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device
        )
        gradient = ordered.copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements lie side by side in memory, in any order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def as_real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones; return other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sum_over_ranks(sync: Sync, rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the sums of these rows over the ranks, by one all-reduce."""
    flat = torch.cat(list(rows))
    real = as_real(flat)
    summed = sync.sum_tensor(real).view_as(real)
    if flat.is_complex():
        summed = torch.view_as_complex(summed)
    pieces: Sequence[Tensor] = summed.split([row.numel() for row in rows])
    return pieces


# Steps


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Make `optimizer.step()` step these parameters alone, each with its group's options."""
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
    """Make several steps parts of one: hooks after a step run once, at the end."""
    hooks = HeldPostHooks(optimizer)
    try:
        yield
    finally:
        hooks.restore()
    hooks.run()


class HeldPostHooks:
    """The hooks after an optimizer's step, held back from now on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hooks = optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_post_hooks = OrderedDict()

    def restore(self) -> None:
        """Give the hooks back to the optimizer."""
        self._optimizer._optimizer_step_post_hooks = self._hooks

    def run(self) -> None:
        """Call the hooks once."""
        for hook in list(self._hooks.values()):
            hook(self._optimizer, (), {})


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
        if not type(optimizer).__module__.startswith("torch.optim.") and not _has_parts(optimizer):
            raise UnsupportedError(
                f"{option} with {name}: stepping one parameter after the other made another "
                "update than stepping all at once (it reckons across parameters), or its step "
                "failed on a small example; keep the gradients on the device"
            )


def _has_parts(optimizer: torch.optim.Optimizer) -> bool:
    """True if steps in parts end where steps on all parameters do, on a small example."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            at_once, parted = (_trained_like(optimizer, parted=parted) for parted in (False, True))
            return all(map(torch.equal, at_once, parted))
    except Exception:  # an unknown optimizer may raise anything, and then nothing is shown
        return False


def _trained_like(optimizer: torch.optim.Optimizer, *, parted: bool) -> list[Tensor]:
    """Return two small parameters after three steps of such an optimizer."""
    kind: Any = type(optimizer)
    like: Tensor = optimizer.param_groups[0]["params"][0]
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> Tensor:
        return torch.randn(4, 3, generator=generator).to(like.device, like.dtype) * scale

    parameters = [nn.Parameter(random(scale)) for scale in (1.0, 5.0)]
    made: torch.optim.Optimizer = kind(parameters, **optimizer.defaults)
    for _ in range(3):
        gradients = [random(scale) for scale in (0.1, 10.0)]
        for some in [[parameter] for parameter in parameters] if parted else [parameters]:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if any(parameter is one for one in some) else None
            with only(made, some):
                made.step()
    return [parameter.detach() for parameter in parameters]
