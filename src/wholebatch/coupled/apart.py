"""Is the loss of a batch that of its parts? Where it is not, it compares samples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from wholebatch import randomness
from wholebatch.loss import Loss, as_loss
from wholebatch.precision import SIXTEEN_BIT
from wholebatch.splitting.layout import Layout

__all__ = ["Apart", "Outside", "loss_apart"]


@dataclass(frozen=True, slots=True)
class Apart:
    """The mean loss of a few samples, and that of the same samples taken in another way."""

    together: float
    apart: float
    how: str = "in two halves"

    def __str__(self) -> str:
        gap = abs(self.together - self.apart) / max(abs(self.together), abs(self.apart))
        return (
            f"the loss of some samples is {self.together:.6g}, of the same {self.how} "
            f"{self.apart:.6g} (relative difference {gap:.0e}). Either it, or the model under it, "
            "compares samples or lets the batch decide something (a capacity, a path): what the "
            "loss does so belongs into wb.Coupled(encode, loss), which sees the whole batch. Or it "
            "adds something once per micro-batch: multiply that by the micro-batch's units"
        )


@dataclass(frozen=True, slots=True)
class Outside:
    """A BatchNorm that uses its batch, in a module that the loss function runs beside the model."""

    type: str

    def __str__(self) -> str:
        return (
            f"runs a {self.type} in training mode that is not in the model, so that nobody can "
            "make it exact: give all modules that it runs (model=[net, other]; loss(model, micro) "
            "is then given the list), or put that one into evaluation mode"
        )


@dataclass(frozen=True, slots=True)
class _Sum:
    total: float
    units: float
    size: float  # of what was summed, as far as it can be told
    dtype: torch.dtype

    @property
    def mean(self) -> float:
        return self.total / self.units if self.units else math.nan


_Sums: TypeAlias = dict[str, _Sum]


def loss_apart(
    model: nn.Module,
    layout: Layout,
    count: int,
    call: Callable[[Any, Any], Any],
    begin: Callable[[], None],
) -> Apart | Outside | None:
    """The loss of the first samples beside that of their halves, where these differ; else None.

    `call(model, batch)` is run on an even number of the first `count` samples, on the same in
    another order, and on each half; in evaluation mode, so that dropout is no reason to differ.
    `begin()` is called before each. None also where nothing can be told: from a loss that is random
    all the same, say. Where nothing is, another order must make no difference either. A BatchNorm
    that is called and not in the model is an answer by itself.
    """
    half = count // 2
    first, second = list(range(half)), list(range(half, 2 * half))
    drawn: list[bool] = []

    def loss(rows: list[int]) -> _Sums:
        # A loss must lead back to the model to be one; what that would hold is dropped at once,
        # unless the loss itself goes that way (a gradient penalty).
        for holding in (saved_tensors_hooks(_dropped, _gone), nullcontext()):
            begin()
            random.seed(0)  # the same each time: a path that is drawn for a batch stays one
            torch.manual_seed(0)
            before = randomness.capture()
            with suppress(_GoesBack), torch.enable_grad(), holding:
                sums = _sums(call(model, layout.take(rows)))
                drawn.append(not _are_equal(before, randomness.capture()))
                return sums
        return {}

    with _evaluating(model), _Called(model) as called:
        try:
            whole, shuffled = loss(first + second), loss(second + first)
            parts = [loss(first), loss(second)] if half else []
            found = None
            if called.outside is None:
                found = _differing(whole, shuffled, parts, drawn=any(drawn), low=called.low)
            if found is not None and _differing(
                whole, loss(first + second), [], drawn=False, low=called.low
            ):
                return None  # another one each time: it counts its calls, say
        except torch.OutOfMemoryError:
            raise
        except Exception:  # not a loss, or none in evaluation mode
            return called.outside
    return called.outside or found


def _differing(
    whole: _Sums, shuffled: _Sums, parts: Sequence[_Sums], *, drawn: bool, low: bool
) -> Apart | None:
    """The first term that is another one of the parts or, if nothing is drawn, in another order."""
    if not all(part.keys() == whole.keys() for part in (shuffled, *parts)):
        return None
    for name, together in whole.items():
        other = shuffled[name]
        noise = abs(together.mean - other.mean) if drawn else 0.0
        of_parts = _compared(together, [part[name] for part in parts], noise=noise, low=low)
        if of_parts is not None:
            return Apart(together.mean, of_parts)
        # Without random numbers the order of samples can matter only to what compares them.
        in_order = None if drawn else _compared(together, [other], noise=0.0, low=low)
        if in_order is not None:
            return Apart(together.mean, in_order, how="in another order")
    return None


def _compared(together: _Sum, parts: Sequence[_Sum], *, noise: float, low: bool) -> float | None:
    """The mean loss of the parts, where it is another one."""
    units = sum(part.units for part in parts)
    if not units or not math.isfinite(noise):
        return None
    apart = sum(part.total for part in parts) / units
    size = max(abs(together.mean), sum(part.size for part in parts) / units)
    wide = together.dtype == torch.float64 and not low
    # Far more than rounding makes of it, far less than negatives from a smaller batch do.
    allowed = size * (1e-9 if wide else 5e-2 if low or together.dtype in SIXTEEN_BIT else 1e-3)
    if size < (1e-12 if wide else 1e-6) or not math.isfinite(apart) or noise > allowed:
        return None
    return apart if abs(together.mean - apart) > allowed + 10 * noise else None


def _sums(result: Any) -> _Sums:
    if isinstance(result, Tensor) and result.dim() and result.is_floating_point():
        size = float(result.detach().abs().sum())
        return {"": _Sum(float(result.detach().sum()), result.numel(), size, result.dtype)}
    loss = as_loss(result)
    terms = {"": loss} if isinstance(loss, Loss) else loss.by_name
    return {
        name: _Sum(
            total := float(term.total.detach()), float(term.units), abs(total), term.total.dtype
        )
        for name, term in terms.items()
    }


def _are_equal(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return torch.equal(before, after)
    if isinstance(before, (list, tuple)):
        return all(_are_equal(a, b) for a, b in zip(before, after, strict=True))
    if isinstance(before, dict):
        return all(_are_equal(before[key], after[key]) for key in before)
    return bool(before == after)


def _dropped(tensor: Tensor) -> None:
    return None


class _GoesBack(Exception):
    """The loss function runs a backward of its own."""


def _gone(nothing: None) -> Tensor:
    raise _GoesBack


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Called:
    """Looks at the modules that are called: do they compute in 16 bits, are all in the model?"""

    def __init__(self, model: nn.Module) -> None:
        self._own = {id(module) for module in model.modules()}
        self.low = any(parameter.dtype in SIXTEEN_BIT for parameter in model.parameters())
        self.outside: Outside | None = None

    def __enter__(self) -> _Called:
        self._hook = register_module_forward_pre_hook(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _look(self, module: nn.Module, args: Any) -> None:
        self.low = self.low or any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        if isinstance(module, _BatchNorm) and module.training and id(module) not in self._own:
            self.outside = Outside(type(module).__name__)
