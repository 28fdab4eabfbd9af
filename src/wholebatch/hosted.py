"""A window in a loop that is somebody else's.

A trainer of another library makes the forwards, the backwards and the step, and clips and logs in
between. What is left to us is the scale. Its loss is a mean over the micro-batch's units; a hook
on that loss multiplies what flows into the graph by `units × seed`, with one seed for the window
and all ranks, so that after the last backward the gradients are

    seed / (host's divisors) × sum over micro-batches and ranks of units × d(mean)

and `settle` multiplies them by the one number that makes this the gradient of the undivided global
batch. Whatever the trainer does with gradients comes after that and sees the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.close import Holder, Policy, power_of_two_near, read_scalars
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.errors import EmptyWindowError, LossError, OptionError, StateError, WindowError
from wholebatch.loss import Units, check_units
from wholebatch.sync.group import Group

__all__ = ["Hosted", "Ranks", "Settled", "all_parameters", "gradient_holders", "ranks_of"]


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
    """All processes of torch.distributed, or this one alone where it is not in use."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return _OneProcess()
    return Group([None], device, rank=dist.get_rank())


@dataclass(frozen=True)
class Settled:
    """What a window was: its exact mean loss over all units of all ranks."""

    loss: float
    units: float
    micro_batches: int


class Hosted:
    """The ledger of a window whose backwards and update a host makes.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(()))
    >>> window = Hosted([], device=torch.device("cpu"))
    >>> for samples in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([8.0])):
    ...     mean = (weight * samples).mean()
    ...     window.weigh(mean, units=len(samples))
    ...     mean.backward()                          # the host's
    >>> settled = window.settle([weight])
    >>> weight.grad.item(), settled.loss, settled.units
    (3.5, 3.5, 4.0)
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        device: torch.device,
        ranks: Ranks | None = None,
        batchnorm: str = "refuse",
        zero_units: Policy = "raise",
    ) -> None:
        if zero_units not in ("raise", "skip"):
            raise OptionError(f"zero_units={zero_units!r}: must be 'raise' or 'skip'")
        if batchnorm == "exact":
            raise OptionError(
                'batchnorm="exact" in the loop of another library: exact BatchNorm runs the '
                "forwards of a window in lock-step, and they are not ours; use wb.WholeBatch, or "
                "name another policy"
            )
        self.ranks = ranks_of(device) if ranks is None else ranks
        self.zero_units: Policy = zero_units
        self.updates = 0
        self.last: Settled | None = None
        self._device = device
        self._batchnorms = [choose_batchnorm(batchnorm, model) for model in models]
        self._next_seed: float | None = None
        self._clear()

    def _clear(self) -> None:
        self.micro_batches = 0
        self._seed = 1.0
        self._divided_by = 1.0
        self._totals: list[Tensor | float] = []
        self._units: list[Units] = []

    @property
    def is_open(self) -> bool:
        """Whether micro-batches were weighed that are not settled yet."""
        return self.micro_batches > 0

    def weigh(self, mean: Tensor, units: Units, *, divided_by: float = 1.0) -> None:
        """Give this micro-batch's loss its weight; the host's backward of it comes next.

        `divided_by` is what the host itself divides the loss by on the way (its number of
        micro-batches), to be undone; it must be the same for the whole window.
        """
        _check_mean(mean)
        units = check_units(units)
        if not self.is_open:
            for policy in self._batchnorms:
                policy.begin_window()
            self._seed = self._first_seed(units) if self._next_seed is None else self._next_seed
            self._divided_by = divided_by
        elif divided_by != self._divided_by:
            raise WindowError(
                f"the window's first loss was divided by {self._divided_by:g}, this one is by "
                f"{divided_by:g}: change the number of micro-batches between windows"
            )
        wide = units.double() if isinstance(units, Tensor) else units
        mean.register_hook(_weighing(wide * self._seed))
        self._totals.append(_total(mean.detach(), units))
        self._units.append(units)
        self.micro_batches += 1
        for policy in self._batchnorms:
            policy.micro()

    def _first_seed(self, units: Units) -> float:
        """A power of two near 1/units, the same on all ranks; later windows know better."""
        most = self.ranks.largest(torch.tensor(float(units), device=self._device))
        return power_of_two_near(1.0 / max(float(most), 1.0))

    def settle(self, holders: Iterable[Holder], *, averaged_by: float = 1.0) -> Settled | None:
        """Bring the window's reduced gradients to those of the undivided global batch.

        `averaged_by` is what the host divided them by when it reduced them over the ranks. None:
        the window had no units at all, and `zero_units="skip"` allows that; the gradients are 0.
        """
        if not self.is_open:
            raise WindowError("settle() without a micro-batch: no backward was weighed")
        totals, units = read_scalars(self._totals), read_scalars(self._units)
        total, counted = self.ranks.sum([math.fsum(totals), math.fsum(units)])
        seed, divided_by, count = self._seed, self._divided_by, self.micro_batches
        self._clear()
        for policy in self._batchnorms:
            policy.end_window()
        if counted == 0.0:
            if self.zero_units == "raise":
                raise EmptyWindowError(
                    f"all {count} micro-batches of this window have zero units (every label is "
                    "ignored or every weight is zero), so its mean does not exist: filter such "
                    "batches, or pass zero_units='skip' to make a step with gradient zero"
                )
            self.last = None
            return None
        _multiply(holders, averaged_by * divided_by / (counted * seed))
        self._next_seed = power_of_two_near(1.0 / counted)
        self.updates += 1
        self.last = Settled(loss=total / counted, units=counted, micro_batches=count)
        return self.last

    def discard(self) -> None:
        """Forget the open window; clearing the gradients is the host's."""
        self._clear()
        for policy in self._batchnorms:
            policy.discard_window()

    # ----------------------------------------------------------------- state

    def state_dict(self, parameters: Sequence[nn.Parameter] | None = None) -> dict[str, Any]:
        """What the window holds; with `parameters`, their gradients too, of all ranks together.

        A checkpoint is one file, and every rank holds gradients of its own until the last
        backward. Their sum, given to one rank on the way back, leads to the same update: call it
        on all ranks. Without `parameters` the gradients are the host's to keep.
        """
        totals, units = read_scalars(self._totals), read_scalars(self._units)
        saved: dict[str, Any] = {
            "updates": self.updates,
            "next_seed": self._next_seed,
            "micro_batches": self.micro_batches,
            "seed": self._seed,
            "divided_by": self._divided_by,
            "totals": totals,
            "units": units,
            "batchnorms": [policy.state_dict() for policy in self._batchnorms],
        }
        if parameters is not None and self.is_open:
            total, counted = self.ranks.sum([math.fsum(totals), math.fsum(units)])
            saved.update(totals=[total], units=[counted])
            saved["gradients"] = _summed(parameters, self.ranks)
        return saved

    def load_state_dict(
        self, saved: dict[str, Any], parameters: Sequence[nn.Parameter] | None = None
    ) -> None:
        """Go on with that window; without `parameters`, its gradients must be back in place."""
        if not isinstance(saved, dict) or "next_seed" not in saved:
            raise StateError("this is not the state of a window (it has no 'next_seed')")
        self.updates = saved["updates"]
        self._next_seed = saved["next_seed"]
        self.micro_batches = saved["micro_batches"]
        self._seed = saved["seed"]
        self._divided_by = saved["divided_by"]
        self._totals = list(saved["totals"])
        self._units = list(saved["units"])
        for policy, state in zip(self._batchnorms, saved["batchnorms"], strict=True):
            policy.load_state_dict(state)
        if "gradients" not in saved:
            return
        if parameters is None or len(parameters) != len(saved["gradients"]):
            have = "no" if parameters is None else len(parameters)
            raise StateError(
                f"the state has gradients of {len(saved['gradients'])} parameters, and there are "
                f"{have} parameters here: load it with the model that saved it"
            )
        if self.ranks.rank != 0:  # the first rank has them all
            self._totals, self._units = [0.0], [0.0]
            return
        for parameter, gradient in zip(parameters, saved["gradients"], strict=True):
            parameter.grad = (
                None if gradient is None else gradient.to(parameter.device, parameter.dtype)
            )


def _summed(parameters: Sequence[nn.Parameter], ranks: Ranks) -> list[Tensor | None]:
    """The gradients of these parameters, added over the ranks; None where no rank has one."""
    present = ranks.sum([float(parameter.grad is not None) for parameter in parameters])
    found: list[Tensor | None] = []
    for parameter, on_ranks in zip(parameters, present, strict=True):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if gradient.is_sparse and ranks.size > 1:
            gradient = gradient.to_dense()
        found.append(ranks.sum_tensor(gradient) if on_ranks else None)
    return found


def all_parameters(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[nn.Parameter]:
    """Every parameter of the models and the optimizers, once."""
    seen: dict[int, nn.Parameter] = {}
    for model in models:
        seen.update((id(parameter), parameter) for parameter in model.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            seen.update((id(parameter), parameter) for parameter in group["params"])
    return list(seen.values())


def gradient_holders(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[nn.Parameter]:
    """Every parameter of the models and the optimizers that has a gradient, once."""
    found = all_parameters(models, optimizers)
    return [parameter for parameter in found if parameter.grad is not None]


def _weighing(weight: Units) -> Callable[[Tensor], Tensor]:
    def weigh(gradient: Tensor) -> Tensor:
        if isinstance(weight, Tensor):
            return gradient * weight.to(gradient.device, gradient.dtype)
        return gradient * weight

    return weigh


def _total(mean: Tensor, units: Units) -> Tensor | float:
    """The sum again; a mean over no units (0/0) adds nothing."""
    mean = mean.reshape(())
    if mean.dtype in (torch.float16, torch.bfloat16):
        mean = mean.float()  # times 10,000 is beyond fp16, and 1001 is 1000 in bf16
    if isinstance(units, Tensor):
        units = units.to(mean.device)
        # Not 0.0: where() would copy it from the host, and wait for the device.
        return torch.where(units == 0, mean.new_zeros(()), mean * units)
    return mean * units if units else 0.0


@torch.no_grad()
def _multiply(holders: Iterable[Holder], factor: float) -> None:
    gradients = []
    for holder in holders:
        gradient = holder.grad
        if gradient is None:
            continue
        if gradient.is_sparse and not gradient.is_coalesced():
            gradient = holder.grad = gradient.coalesce()
        gradients.append(gradient._values() if gradient.is_sparse else gradient)
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def _check_mean(mean: object) -> None:
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        what = f"of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else repr(mean)
        raise LossError(f"loss {what}: must be one number, the mean over the micro-batch's units")
    if not mean.requires_grad:
        raise LossError(
            "the loss does not require a gradient: it is detached from the model, was computed "
            "under torch.no_grad(), or every parameter that it depends on is frozen"
        )
