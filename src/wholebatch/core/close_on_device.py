"""The close on the device, before the host knows its numbers.

A close on the host reads the units, then the norm, and only then starts the optimizer's step: the
device has nothing to do meanwhile. A fused optimizer takes its factor, and whether to step at all,
from tensors. So the device is asked for the arithmetic of `close`, in the same order and in
float64, and for the step after it. The host reads the numbers while the device steps.

If the device finds that it must not step (something is not finite, there are no units, or they are
not those that were counted), it leaves everything as it was, and the close on the host decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from wholebatch.core.close import Closed, CloseOptions, Holder, dense_gradients, scalar_on

Numbers = Mapping[str, Sequence[Tensor | float]]
"""By the name of a loss term, one number for each micro-batch."""


@dataclass(frozen=True)
class WindowSums:
    """The totals and units of a window, and the seed of its backwards."""

    totals: Numbers
    units: Numbers
    known: Mapping[str, float] | None
    seed: Tensor | float
    loss_scale: float


@dataclass(frozen=True)
class Ahead:
    """The numbers of a window that was closed on the device; `closed` is None without a step."""

    totals: dict[str, list[float]]
    units: dict[str, list[float]]
    seed: float
    closed: Closed | None


@torch.no_grad()
def close_ahead(
    sums: WindowSums,
    groups: Sequence[Sequence[Holder]],
    optimizers: Sequence[torch.optim.Optimizer],
    options: CloseOptions,
    *,
    total_norm: Callable[[Sequence[Tensor]], Tensor],
    while_waiting: Callable[[], None] | None = None,
) -> Ahead | None:
    """Compute norm, factor and step on the device, then read the numbers; None without gradients.

    `while_waiting` runs on the host while the device steps.
    """
    gradients = [gradient for group in groups for gradient in dense_gradients(group)]
    if not gradients:
        return None
    device = gradients[0].device
    names = sorted(sums.totals)
    totals = [_column(sums.totals[name], device) for name in names]
    units = [_column(sums.units[name], device) for name in names]
    seed = scalar_on(device, sums.seed, torch.float64)
    normalise, good = _normalise(sums, names, totals, units, seed)
    norm = total_norm(gradients).double() * normalise
    clip = torch.ones_like(norm)
    if options.clip_norm is not None:
        assert not isinstance(options.clip_norm, Sequence)
        limit = torch.full_like(norm, options.clip_norm)
        clip = (limit / (norm + 1e-6)).clamp(max=1.0)
    good = good & norm.isfinite()
    ones = torch.ones_like(norm)  # a Python number would be copied from the host
    scale = torch.where(good, 1.0 / (normalise * clip), ones).float()
    bad = good.logical_not()

    columns = [torch.stack([norm, clip, bad.double(), seed]), *totals, *units]
    reading = _Reading(torch.cat(columns))
    for optimizer in optimizers:
        _step(optimizer, scale, bad.float())
    if while_waiting is not None:
        while_waiting()

    (norm_is, clip_is, bad_is, seed_is), *lists = reading.wait([len(column) for column in columns])
    return Ahead(
        totals=dict(zip(names, lists[: len(names)], strict=True)),
        units=dict(zip(names, lists[len(names) :], strict=True)),
        seed=seed_is,
        closed=None if bad_is else Closed(norm=norm_is, clip=clip_is, finite=True, stepped=True),
    )


def _normalise(
    sums: WindowSums,
    names: Sequence[str],
    totals: Sequence[Tensor],
    units: Sequence[Tensor],
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the factor that normalises the gradients, and whether the sums allow a step."""
    total = torch.stack([column.sum() for column in totals])
    count = torch.stack([column.sum() for column in units])
    largest = count.max()
    good = total.isfinite().all() & (largest > 0)
    if sums.known is None:
        return 1.0 / (largest * seed) / sums.loss_scale, good
    known = torch.tensor([sums.known[name] for name in names], dtype=torch.float64)
    known = known.to(seed.device, non_blocking=True)
    good = good & torch.isclose(count, known, rtol=1e-6, atol=0.0).all()
    return torch.ones((), dtype=torch.float64, device=seed.device) / sums.loss_scale, good


def _column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return numbers and 0-dim tensors as one column on the device."""
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
    """Copies numbers to the host without waiting for later work of the device."""

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
