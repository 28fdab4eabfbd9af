"""The close on the device, before the host knows its numbers.

A close on the host reads the units, then the norm, and only then asks for the optimizer's step: the
device has nothing to do meanwhile. A fused optimizer takes its factor, and whether to step at all,
from tensors. So the same arithmetic as in `close` is asked of the device, in the same order and in
float64, the step after it, and the host reads the numbers while the device steps.

Where the device finds that it must not step (something is not finite, there are no units, or they
are not those that were counted) it leaves everything as it was, and the close on the host decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from wholebatch.core.close import Closed, CloseOptions, Holder, dense_gradients, scalar_on
from wholebatch.core.optimizer_step import takes_grad_scale

__all__ = ["Ahead", "Numbers", "Sums", "can_close_ahead", "close_ahead"]

_STEPS_ON_DEVICE = (torch.optim.Adam, torch.optim.AdamW)
"""Fused, these leave parameters and state as they were where `found_inf` says so."""

Numbers = Mapping[str, Sequence[Tensor | float]]


@dataclass(frozen=True)
class Sums:
    """What a window has collected, and what its backwards started from."""

    totals: Numbers
    units: Numbers
    known: Mapping[str, float] | None
    seed: Tensor | float
    loss_scale: float


@dataclass(frozen=True)
class Ahead:
    """The numbers of a window, read once; `closed` is None where the device did not step."""

    totals: dict[str, list[float]]
    units: dict[str, list[float]]
    seed: float
    closed: Closed | None


def can_close_ahead(
    optimizers: Sequence[torch.optim.Optimizer], options: CloseOptions, device: torch.device
) -> bool:
    """Whether the device can do all of it, and the host would only wait."""
    return (
        device.type == "cuda"
        and options.clip_value is None
        and not isinstance(options.clip_norm, Sequence)
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
        and all(_steps_on_device(optimizer) for optimizer in optimizers)
    )


def _steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return (
        type(optimizer) in _STEPS_ON_DEVICE
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and takes_grad_scale(optimizer)
    )


@torch.no_grad()
def close_ahead(
    sums: Sums,
    groups: Sequence[Sequence[Holder]],
    optimizers: Sequence[torch.optim.Optimizer],
    options: CloseOptions,
    *,
    total_norm: Callable[[Sequence[Tensor]], Tensor],
    while_waiting: Callable[[], None] | None = None,
) -> Ahead | None:
    """Norm, factor and step on the device, then the numbers; None where there is no gradient."""
    gradients = [gradient for group in groups for gradient in dense_gradients(group)]
    if not gradients:
        return None
    device = gradients[0].device
    names = sorted(sums.totals)
    totals = {name: _column(sums.totals[name], device) for name in names}
    units = {name: _column(sums.units[name], device) for name in names}
    sum_of = torch.stack([totals[name].sum() for name in names])
    units_of = torch.stack([units[name].sum() for name in names])
    seed = scalar_on(device, sums.seed, torch.float64)
    largest = units_of.max()
    good = sum_of.isfinite().all() & (largest > 0)
    if sums.known is None:
        normalise = 1.0 / (largest * seed)
    else:
        counted = torch.tensor([sums.known[name] for name in names], dtype=torch.float64)
        counted = counted.to(device, non_blocking=True)
        good = good & torch.isclose(units_of, counted, rtol=1e-6, atol=0.0).all()
        normalise = torch.ones((), dtype=torch.float64, device=device)
    normalise = normalise / sums.loss_scale
    norm = total_norm(gradients).double() * normalise
    clip = torch.ones_like(norm)
    if options.clip_norm is not None:
        assert not isinstance(options.clip_norm, Sequence)
        limit = torch.full_like(norm, options.clip_norm)
        clip = (limit / (norm + 1e-6)).clamp(max=1.0)
    good = good & norm.isfinite()
    ones = torch.ones_like(norm)  # a number of Python's would be copied from the host
    scale = torch.where(good, 1.0 / (normalise * clip), ones).float()
    bad = good.logical_not()

    columns = [torch.stack([norm, clip, bad.double(), seed])]
    columns += [column for name in names for column in (totals[name], units[name])]
    reading = _Reading(torch.cat(columns))
    for optimizer in optimizers:
        _step(optimizer, scale, bad.float())
    if while_waiting is not None:
        while_waiting()

    (norm_is, clip_is, bad_is, seed_is), *lists = reading.wait(
        [column.numel() for column in columns]
    )
    return Ahead(
        totals=dict(zip(names, lists[0::2], strict=True)),
        units=dict(zip(names, lists[1::2], strict=True)),
        seed=seed_is,
        closed=None if bad_is else Closed(norm=norm_is, clip=clip_is, finite=True, stepped=True),
    )


def _column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Numbers and 0-dim tensors, in their order, as one column on the device."""
    if all(isinstance(value, Tensor) for value in values):
        tensors = cast("Sequence[Tensor]", values)
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
            return torch.stack(list(tensors)).to(device, torch.float64)
        return torch.stack([tensor.to(device, torch.float64) for tensor in tensors])
    if not any(isinstance(value, Tensor) for value in values):
        column = torch.tensor(values, dtype=torch.float64)
        return column.to(device, non_blocking=True)
    return torch.stack([scalar_on(device, value, torch.float64) for value in values])


class _Reading:
    """Numbers on their way to the host; later work of the device is not waited for."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def wait(self, lengths: list[int]) -> list[list[float]]:
        if self._event is not None:
            self._event.synchronize()
        return [part.tolist() for part in self._host.split(lengths)]


def _step(optimizer: torch.optim.Optimizer, scale: Tensor, found_inf: Tensor) -> None:
    fused = cast("Any", optimizer)
    fused.grad_scale, fused.found_inf = scale, found_inf
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
