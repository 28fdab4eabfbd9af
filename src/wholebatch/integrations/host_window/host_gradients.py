"""The gradients that a host's backwards leave: watched while a window is open, added in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.core.close import Holder, dense_gradients, read_scalars
from wholebatch.core.foreign_writes import Watch
from wholebatch.core.model_and_optimizer import name_of
from wholebatch.core.precision import SIXTEEN_BIT, SixteenBit
from wholebatch.distributed import Single
from wholebatch.distributed.process_group import Group
from wholebatch.errors import WindowError

__all__ = ["GradientsIn", "HostGradients", "RankGroup", "all_finite", "all_parameters", "multiply"]

RankGroup: TypeAlias = Group | Single

GradientsIn: TypeAlias = Literal["whole", "sharded", "elsewhere"]
"""Where a host's engine keeps gradients between two backwards of a window: whole ones in `.grad`;
in the engine until the last backward leaves slices in `.grad` (FSDP); nowhere that we see."""

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


class HostGradients:
    """The parameters of a host's optimizers, with what a window has added to their gradients.

    Those of 16-bit parameters are added in fp32 beside `.grad`. bf16 keeps 8 bits: 256 additions
    leave an error of 1.6e-2, fp32 of 1.2e-3 (that of the gradients themselves). A host's engine
    (DDP's buckets) needs `.grad` in the parameter's dtype, so every backward's gradient is moved
    over here, and `finish` gives the sum back.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        kept: GradientsIn,
    ) -> None:
        self._models, self._optimizers, self.kept = models, optimizers, kept
        self._watch = Watch(optimizers)
        self.trained: list[nn.Parameter] = []
        self._sixteen_bit = SixteenBit(optimizers if kept == "whole" else ())
        self._sums: dict[int, Tensor] = {}  # of 16-bit parameters, by id
        self.wide = False
        """True if 16-bit parameters have fp32 gradients in `.grad` itself, as graphs need it."""
        self.unused = False  # True if a window was settled and no optimizer has stepped since
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.unused = False

    def holders(self) -> list[nn.Parameter]:
        """Return the parameters whose `.grad` is the window's, once its backwards are made."""
        if self.kept == "elsewhere":
            return []
        return all_parameters(self._models, self._optimizers)

    def begin(self) -> None:
        """Begin a window; refuse gradients that are there before its first backward."""
        self.trained = self.find_trained()
        if self.kept != "elsewhere":
            self._refuse_left_over()
        self._begin_sums()

    def find_trained(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizers train now."""
        found = all_parameters(() if self._optimizers else self._models, self._optimizers)
        return [parameter for parameter in found if parameter.requires_grad]

    @property
    def has_sixteen_bit(self) -> bool:
        """True if a parameter that is trained has 16 bit."""
        return bool(self._sixteen_bit.parameters)

    def _refuse_left_over(self) -> None:
        holders = [parameter for parameter in self.trained if parameter.grad is not None]
        dirty = read_scalars([local.any() for local in _local_gradients(holders)])
        for parameter, is_dirty in zip(holders, dirty, strict=True):
            if is_dirty:
                why = (
                    "the window before was completed, but no optimizer.step() was made from it"
                    if self.unused
                    else "this window did not make it"
                )
                raise WindowError(
                    f"{name_of(parameter, self._models)} holds a gradient at the first backward of "
                    f"a window, and it would be counted in ({why}): call optimizer.zero_grad() "
                    "after every optimizer.step(), and give every loss to the window"
                )

    def _begin_sums(self) -> None:
        """Clear the 16-bit gradients: the last window may have left zeros in fp32."""
        self._sums.clear()
        for parameter in self._sixteen_bit.parameters:
            parameter.grad = None
        self._sixteen_bit.end()
        if self.wide:
            self._sixteen_bit.begin()

    @torch.no_grad()
    def add(self) -> None:
        """Take over what a backward has made, and remember how it leaves the others."""
        for parameter in () if self.wide else self._sixteen_bit.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if id(parameter) in self._sums:
                self._sums[id(parameter)] += gradient.float()
            else:
                self._sums[id(parameter)] = gradient.float()
            parameter.grad = None
        if self.kept == "whole":
            if not self.trained:  # a window that was loaded
                self.trained = self.find_trained()
            self._watch.remember(self.trained)

    def check(self, micro_batches: int) -> None:
        """Refuse to go on if others have written the gradients or parameters of the window."""
        found = self._watch.changed(self.trained)
        if found is None:
            self._watch.warn_of_rates()
            return
        parameter, what = found
        raise WindowError(
            f"{_TOUCHED[what].format(name_of(parameter, self._models))}; discard() and zero_grad() "
            f"drop the {micro_batches} micro-batches that this window holds"
        )

    @torch.no_grad()
    def reduce(self, group: RankGroup, averaged_by: float) -> None:
        """Average the gradients over the ranks, where no backward of the host did."""
        gradients = [parameter.grad for parameter in self.trained]
        for parameter, total in zip(
            self.trained, _summed(gradients, self.trained, group), strict=True
        ):
            parameter.grad = None if total is None else total.div_(averaged_by)

    @torch.no_grad()
    def finish(self, group: RankGroup, averaged_by: float) -> None:
        """Give the fp32 sums to `.grad`, averaged over the ranks as the host's others are."""
        parameters = self._sixteen_bit.parameters
        if not parameters:
            return
        sums = self._held(parameters)
        if group.ranks > 1:
            sums = _summed(sums, parameters, group)
        self._sixteen_bit.begin()
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total if total is None or averaged_by == 1 else total / averaged_by
        self._sums.clear()

    def round_once(self) -> None:
        """Round the sums where the optimizer cannot take them in fp32 (the Adam family)."""
        self._sixteen_bit.round_once()

    def forget(self) -> None:
        """End the window: drop its sums, and no longer watch the others."""
        self._watch.forget()
        self._sums.clear()

    # ------------------------------------------------------------------ state

    def _held(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return what the window has added for these parameters on this rank."""
        return [self._sums.get(id(parameter), parameter.grad) for parameter in parameters]

    def held_by_all(
        self, parameters: Sequence[nn.Parameter], group: RankGroup
    ) -> list[Tensor | None]:
        """Return a copy of what the window has added for these parameters, over all ranks."""
        return _summed(self._held(parameters), parameters, group)

    def put_back(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
    ) -> None:
        """Go on with what `held_by_all` has returned."""
        self._begin_sums()
        sixteen_bit = set(map(id, self._sixteen_bit.parameters))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and id(parameter) in sixteen_bit:
                self._sums[id(parameter)] = gradient.to(parameter.device, torch.float32)
            else:
                parameter.grad = None if gradient is None else gradient.to(parameter)


def all_parameters(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[nn.Parameter]:
    """Return every parameter of the models and the optimizers, once."""
    found = [parameter for model in models for parameter in model.parameters()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found += [parameter for group in groups for parameter in group["params"]]
    return list({id(parameter): parameter for parameter in found}.values())


def all_finite(holders: Iterable[Holder]) -> bool:
    """Return True if every gradient of this process is finite."""
    values = [local for local in _local_gradients(holders) if local.numel()]
    norms = torch._foreach_norm(values, math.inf) if values else []
    return all(map(math.isfinite, read_scalars(norms)))


@torch.no_grad()
def multiply(holders: Iterable[Holder], factor: float) -> None:
    """Multiply the gradients in place."""
    gradients = dense_gradients(holders)
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def _local_gradients(holders: Iterable[Holder]) -> list[Tensor]:
    """Return the gradients as dense tensors, of sharded ones this rank's part."""
    return [getattr(found, "_local_tensor", found) for found in dense_gradients(holders)]


def _summed(
    gradients: Sequence[Tensor | None], like: Sequence[Tensor], group: RankGroup
) -> list[Tensor | None]:
    """Return copies of these gradients, added over the ranks; None where no rank has one."""
    present = group.sum([float(gradient is not None) for gradient in gradients])
    found: list[Tensor | None] = []
    for gradient, parameter, on_ranks in zip(gradients, like, present, strict=True):
        if not on_ranks:
            found.append(None)
            continue
        dtype = torch.float32 if parameter.dtype in SIXTEEN_BIT else parameter.dtype
        mine = torch.zeros_like(parameter, dtype=dtype) if gradient is None else gradient
        mine = mine.to_dense() if mine.is_sparse and group.ranks > 1 else mine
        found.append(group.sum_tensor(mine.detach().clone()))
    return found
