"""Gradients stay in `.grad`, beside the parameters: the plain window."""

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
    Holder,
    close_gradients,
    dense_gradients,
    scalar_on,
)
from wholebatch.core.gradient_hooks import DeferredHooks
from wholebatch.core.gradient_store import Ahead, Store, WindowSums
from wholebatch.core.optimizer_step import stepping, takes_grad_scale
from wholebatch.errors import WindowError

__all__ = ["DeviceStore", "can_close_ahead", "close_ahead"]


class DeviceStore(Store):
    """Autograd adds into `.grad`; the close and the optimizer read them there."""

    at_once = True
    steps_on_all = True
    opened: Callable[[], None] | None = None
    """Called when a window opens and no gradient is there yet."""

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
        if not self.in_grad:  # gradients, or the state beside them, are not all there at once
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
        """Leave the gradients to the user, as `.grad` of the parameters' own dtype.

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
    sums: WindowSums,
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
