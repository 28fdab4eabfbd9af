"""Gradients stay in `.grad`, beside the parameters: the plain window.

A close on the host reads the units, then the norm, and only then starts the optimizer's step: the
device has nothing to do meanwhile. A fused optimizer takes its factor, and whether to step at all,
from tensors. So where it can, the store asks the device for the arithmetic of `close`, in the same
order and in float64, and for the step after it. The host reads the numbers while the device steps.
If the device finds that it must not step (something is not finite, there are no units, or they are
not those that were counted), it leaves everything as it was, and the close on the host decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from wholebatch.core.close import (
    Closed,
    CloseOptions,
    DeferredHooks,
    Holder,
    close_gradients,
    dense_gradients,
    scalar_on,
)
from wholebatch.core.gradient_store import Ahead, Store, WindowSums
from wholebatch.core.optimizer_step import stepping, takes_grad_scale
from wholebatch.errors import WindowError

__all__ = ["DeviceStore", "can_close_ahead", "close_ahead"]


class DeviceStore(Store):
    """Autograd adds into `.grad`; the close and the optimizer read it there."""

    steps_on_all = True
    opened: Callable[[], None] | None = None
    """Called when a window opens, before there is a gradient."""

    def begin(
        self, parameters: list[nn.Parameter], known: Mapping[str, float] | None = None
    ) -> None:
        super().begin(parameters, known)
        self.target.sixteen_bit.begin()
        if self.opened is not None:
            self.opened()

    def close_ahead(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        sums: WindowSums,
        hooks: DeferredHooks,
        while_waiting: Callable[[], None] | None,
    ) -> Ahead | None:
        target = self.target
        if not self.in_grad:  # gradients and optimizer state are not all there at once
            return None
        if self.sync.ranks > 1 or self.sync.grows_own_graph or hooks or target.sixteen_bit:
            return None
        if not can_close_ahead(target.optimizers, self.options, target.device):
            return None
        before = self.before_step()
        try:
            return close_ahead(
                sums,
                groups,
                target.optimizers,
                self.options,
                total_norm=self.sync.total_norm,
                while_waiting=while_waiting,
            )
        except torch.OutOfMemoryError as error:
            failure = str(error)
        self.failed_in_step(before, failure)

    def close(
        self, groups: Sequence[Sequence[nn.Parameter]], normalise: float, hooks: DeferredHooks
    ) -> Closed:
        return close_gradients(
            self.sync.holders(groups),
            self.target.optimizers,
            self.options,
            normalise,
            before_clip=hooks.run if hooks.taken else None,
            on_gradient=hooks.call if hooks.calls else None,
            total_norm=self.sync.total_norm,
            in_place=bool(self.target.sixteen_bit),
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
        self.target.sixteen_bit.round_once()
        for optimizer in self.target.optimizers:
            with stepping(optimizer, remaining):
                optimizer.step()

    def check_hand_over(self) -> None:
        if not self.steps_on_all:
            super().check_hand_over()
        if self.sync.owns_step:
            raise WindowError(
                "gradient() with a DeepSpeed engine: it steps its own optimizer; use step()"
            )

    @torch.no_grad()
    def hand_over(self, remaining: float) -> None:
        """Leave the gradients to the user, in `.grad` and in the parameters' own dtype.

        They are new tensors: a compiled micro-step writes into the old ones in every window.
        """
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            gradient = gradient.clone() if remaining == 1.0 else gradient * remaining
            if gradient.dtype is not parameter.dtype:  # the sum of a 16-bit one is float32
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
            parameter.grad = gradient.to(parameter.dtype)
        self.parameters = []

    def saved(self) -> list[Tensor | None]:
        return [
            None if parameter.grad is None else parameter.grad.detach().clone()
            for parameter in self.parameters
        ]

    def load(self, saved: Any) -> None:
        for parameter, gradient in zip(self.parameters, saved, strict=True):
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, copy=True)

    def discard(self) -> None:
        super().discard()
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
