"""The processes that share a window, as far as counts and sums are concerned.

The gradients of a host's parameters: found, looked at, scaled, cleared, kept in fp32.

A window of a host begins clean, is left alone while it is open, and ends used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.core.close import Holder, read_scalars
from wholebatch.core.foreign_writes import Watch
from wholebatch.core.precision import SIXTEEN_BIT, SixteenBit
from wholebatch.distributed.process_group import Group
from wholebatch.errors import WindowError

__all__ = [
    "Clean",
    "Gradients",
    "Ranks",
    "WideSums",
    "all_finite",
    "all_parameters",
    "clear",
    "left_over",
    "multiply",
    "ranks_of",
    "summed",
]


class Ranks(Protocol):
    """The data-parallel ranks, as far as counts are concerned."""

    size: int
    rank: int

    def sum(self, values: Sequence[float]) -> list[float]: ...
    def sum_tensor(self, tensor: Tensor) -> Tensor: ...
    def largest(self, value: Tensor) -> Tensor: ...


class _OneProcess:
    size = 1
    rank = 0

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def largest(self, value: Tensor) -> Tensor:
        return value


def ranks_of(device: torch.device) -> Ranks:
    """Return all processes of torch.distributed, or this one alone where it is not in use."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return _OneProcess()
    return Group([None], device, rank=dist.get_rank())


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


_TOUCHED = {
    "gradient": (
        "the gradient of {} has changed since the window's last backward: call zero_grad(), clip "
        "gradients and make other backwards only when the window is complete"
    ),
    "value": (
        "{} has changed in the middle of the window: call optimizer.step() only when the window is "
        "complete"
    ),
    "frozen": "{} was frozen in the middle of the window: freeze and unfreeze between windows",
}


class Clean:
    """What nobody else may touch: the parameters of a window's optimizers and their gradients."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._models, self._optimizers = models, optimizers
        self._watch = Watch(optimizers)
        self._inputs: list[nn.Parameter] = []
        self.unused = False  # whether a window was settled that no step was made from
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.unused = False

    def forget(self) -> None:
        """The window is over."""
        self._watch.forget()

    def begin(self, *, in_grad: bool) -> None:
        """Refuse gradients that are there before the window's first backward."""
        self._take()
        dirty = left_over(self._inputs) if in_grad else None
        if dirty is None:
            return
        why = (
            "the window before was completed, but no optimizer.step() was made from it"
            if self.unused
            else "this window did not make it"
        )
        raise WindowError(
            f"{self._name_of(dirty)} holds a gradient at the first backward of a window, and it "
            f"would be counted in ({why}): call optimizer.zero_grad() after every "
            "optimizer.step(), and give every loss to the window"
        )

    def _take(self) -> None:
        found = all_parameters(() if self._optimizers else self._models, self._optimizers)
        self._inputs = [parameter for parameter in found if parameter.requires_grad]

    def remember(self) -> None:
        """A backward of the window is made: how it leaves the gradients."""
        if not self._inputs:  # a window that was loaded
            self._take()
        self._watch.remember(self._inputs)

    def check(self, micro_batches: int) -> None:
        """Refuse to go on with a window that is no longer what its backwards made."""
        found = self._watch.changed(self._inputs)
        if found is None:
            self._watch.warn_of_rates()
            return
        parameter, what = found
        raise WindowError(
            f"{_TOUCHED[what].format(self._name_of(parameter))}; discard() and zero_grad() drop "
            f"the {micro_batches} micro-batches that this window holds"
        )

    def _name_of(self, parameter: nn.Parameter) -> str:
        for model in self._models:
            for name, one in model.named_parameters():
                if one is parameter:
                    return name
        return f"a parameter of shape {tuple(parameter.shape)}"
