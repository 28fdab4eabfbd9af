"""The gradients of a host's parameters: found, looked at, scaled, cleared, kept in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.core.close import Holder, read_scalars
from wholebatch.core.precision import SIXTEEN_BIT, SixteenBit
from wholebatch.integrations.host_window.host_ranks import Ranks

__all__ = [
    "Gradients",
    "WideSums",
    "all_finite",
    "all_parameters",
    "clear",
    "left_over",
    "multiply",
    "summed",
]

Gradients: TypeAlias = Literal["whole", "sharded", "elsewhere"]
"""Where a host's engine keeps gradients between two backwards of a window: whole ones in `.grad`;
in the engine until the last backward leaves slices in `.grad` (FSDP); nowhere that we see."""


def all_parameters(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[nn.Parameter]:
    """Return every parameter of the models and the optimizers, once."""
    seen: dict[int, nn.Parameter] = {}
    for model in models:
        seen.update((id(parameter), parameter) for parameter in model.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            seen.update((id(parameter), parameter) for parameter in group["params"])
    return list(seen.values())


def left_over(parameters: Sequence[nn.Parameter]) -> nn.Parameter | None:
    """Return a parameter that holds a gradient other than zero; one read for all of them."""
    holders = [parameter for parameter in parameters if parameter.grad is not None]
    dirty = read_scalars([_values(holder).any() for holder in holders])
    return next((one for one, is_dirty in zip(holders, dirty, strict=True) if is_dirty), None)


def all_finite(holders: Iterable[Holder]) -> bool:
    """Say whether every gradient of this process is finite."""
    found = [_values(holder) for holder in holders if holder.grad is not None]
    values = [value for value in found if value.numel()]
    if not values:
        return True
    return all(map(math.isfinite, read_scalars(torch._foreach_norm(values, math.inf))))


@torch.no_grad()
def multiply(holders: Iterable[Holder], factor: float) -> None:
    """Multiply the gradients in place."""
    gradients = [_values(holder, local=False) for holder in holders if holder.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def clear(holders: Iterable[Holder]) -> None:
    """Leave no gradient: a step of torch's optimizers then changes neither weights nor state."""
    for holder in holders:
        holder.grad = None


def summed(
    gradients: Sequence[Tensor | None], like: Sequence[Tensor], ranks: Ranks
) -> list[Tensor | None]:
    """Return these gradients added over the ranks; None where no rank has one."""
    present = ranks.sum([float(gradient is not None) for gradient in gradients])
    found: list[Tensor | None] = []
    for gradient, parameter, on_ranks in zip(gradients, like, present, strict=True):
        if not on_ranks:
            found.append(None)
            continue
        dtype = torch.float32 if parameter.dtype in SIXTEEN_BIT else parameter.dtype
        mine = torch.zeros_like(parameter, dtype=dtype) if gradient is None else gradient
        mine = mine.to_dense() if mine.is_sparse and ranks.size > 1 else mine
        found.append(ranks.sum_tensor(mine))
    return found


class WideSums:
    """The sums of 16-bit gradients, in fp32 beside `.grad`.

    bf16 keeps 8 bits: 256 additions leave an error of 1.6e-2, fp32 of 1.2e-3 (that of the
    gradients themselves). A host's engine (DDP's buckets) wants `.grad` in the parameter's dtype,
    so after every backward it is moved over here; `finish` gives the sum back.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._sixteen_bit = SixteenBit(optimizers)
        self.parameters = self._sixteen_bit.parameters
        self._sums: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Begin a window: the last one may have left zeros in fp32."""
        self._sums.clear()
        for parameter in self.parameters:
            parameter.grad = None
        self._sixteen_bit.end()

    @torch.no_grad()
    def add(self) -> None:
        """Take over what a backward has made."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if id(parameter) in self._sums:
                self._sums[id(parameter)] += gradient.float()
            else:
                self._sums[id(parameter)] = gradient.float()
            parameter.grad = None

    @torch.no_grad()
    def finish(self, ranks: Ranks, averaged_by: float) -> None:
        """Give the whole sums to `.grad`, averaged over the ranks as the host's others are."""
        if not self.parameters:
            return
        sums = self.held(self.parameters)
        if ranks.size > 1:
            sums = summed(sums, self.parameters, ranks)
        self._sixteen_bit.begin()
        for parameter, total in zip(self.parameters, sums, strict=True):
            parameter.grad = total if total is None or averaged_by == 1 else total / averaged_by
        self._sums.clear()

    def round_once(self) -> None:
        """Round the sums where the optimizer cannot take them in fp32 (the Adam family)."""
        self._sixteen_bit.round_once()

    def held(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return what a window has summed for these parameters on this rank, in any dtype."""
        return [self._sums.get(id(parameter), parameter.grad) for parameter in parameters]

    def put_back(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
    ) -> None:
        """Go on with what `held` has returned."""
        self.begin()
        wide = {id(parameter) for parameter in self.parameters}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and id(parameter) in wide:
                self._sums[id(parameter)] = gradient.to(parameter.device, torch.float32)
            else:
                parameter.grad = None if gradient is None else gradient.to(parameter)

    def clear(self) -> None:
        """Drop the sums."""
        self._sums.clear()


def _values(holder: Holder, *, local: bool = True) -> Tensor:
    """Return a gradient's numbers: a sparse one's values, this rank's part of a sharded one."""
    gradient = holder.grad
    assert gradient is not None
    if gradient.is_sparse:
        if not gradient.is_coalesced():
            gradient = holder.grad = gradient.coalesce()
        return gradient._values()
    part: Tensor = getattr(gradient, "_local_tensor", gradient) if local else gradient
    return part
