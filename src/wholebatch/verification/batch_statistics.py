"""Numbers that a loss takes from a whole micro-batch, and that no gradient goes through.

    kl = reward(policy, others).mean().detach()       # the baseline of KTO
    loss = (1 - torch.sigmoid(beta * (reward(policy, own) - kl))).mean()

Such a number couples the samples of its micro-batch, and the graph of the loss does not show it. So
every torch function that the loop calls outside of its models is followed in the first window:
what is made of a model's outputs, which of that is a statistic over samples, and which losses have
a statistic without a gradient in them. Counts (sums of zeros and ones) are units of the loss, and
the largest number of a batch is often subtracted without any effect: neither is a statistic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from wholebatch.coupled.followed_tensor import Follower, tensors_in

_STATISTICS = {"mean", "nanmean", "sum", "nansum", "std", "var", "std_mean", "var_mean", "norm"}
_STATISTICS |= {"median", "nanmedian", "quantile", "nanquantile", "logsumexp", "vector_norm"}
_OF_THE_FIRST = {"to", "type_as", "view_as", "expand_as", "reshape_as"}
"""Functions that take a type or a shape from their other arguments, and no numbers."""
_SAMPLES, _STATISTIC, _CONSTANT = range(3)
"""Levels: made of the samples' outputs, of a statistic over them, of one without a gradient."""


@dataclass(frozen=True)
class Statistic:
    """A number over the samples of some calls of models."""

    calls: frozenset[int]
    rows: int
    seen: int
    """How many backwards there were before the last of these calls, and before it was taken."""
    born: int


@dataclass(frozen=True)
class _Origin:
    """Where a tensor comes from, and whether a statistic over the samples is in it (its level)."""

    level: int
    calls: dict[int, int]
    """The backwards before each of the calls of models whose outputs it is made of."""
    rows: int
    statistic: Statistic | None = None


class BatchStatistics(Follower):
    """Follows the outputs of models through the loop's own code, until the first step."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = self._depth = self.backwards = 0

    def of(self, losses: Iterable[Tensor]) -> Statistic | None:
        """Return the statistic without a gradient that one of these losses has in it."""
        found = [self.notes.get(loss) for loss in losses]
        return next((one.statistic for one in found if one and one.level == _CONSTANT), None)

    def enter(self, module: nn.Module) -> None:
        """Look away while a model runs; a module without parameters is a part of the loss."""
        if self._depth or next(module.parameters(), None) is not None:
            self._depth += 1
            if self._depth == 1:
                self.pause(True)

    def leave(self, outputs: Callable[[], Iterable[Tensor]]) -> None:
        """Go on after a model has run, with its outputs."""
        if not self._depth:
            return
        self._depth -= 1
        if not self._depth and self.on:
            self.pause(False)
            self._calls += 1
            for one in outputs():
                if one.is_floating_point() and one.dim() and len(one) > 1:
                    calls = {self._calls: self.backwards}
                    self.note(one, _Origin(_SAMPLES, calls, len(one)))

    def add_gradients(self, parameters: Any, gradients: Any) -> None:
        """Follow the gradients of parameters that the loop has asked for: VQGAN's weight is one."""
        statistic = Statistic(frozenset(), 0, sys.maxsize, self.backwards)
        for parameter, one in zip(tensors_in(parameters), gradients, strict=False):
            if isinstance(parameter, nn.Parameter) and one is not None and not one.requires_grad:
                self.note(one, _Origin(_CONSTANT, {}, 0, statistic))

    def see(self, func: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        """Return what follows the results of a call."""
        return partial(self._follow, getattr(func, "__name__", ""), args, kwargs)

    def around_gather(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Follow a number through a gather over the ranks, which torch functions do not show."""
        made = original(*args, **kwargs)
        outputs, given = (*args, *kwargs.values())[:2]
        self._follow("gather", (given,), {}, outputs)
        return made

    def _follow(self, name: str, args: Any, kwargs: Any, made: Any) -> None:
        with suppress(Exception):  # a tensor that cannot be asked is not followed
            self._note_results(name, args, kwargs, made)

    def _note_results(self, name: str, args: Any, kwargs: Any, made: Any) -> None:
        given = tensors_in(args, kwargs)
        given = given[:1] if name in _OF_THE_FIRST else given
        origins = [one for tensor in given if (one := self.notes.get(tensor)) is not None]
        if not origins or name.endswith("_like") or name.startswith("new_"):
            return
        calls = {call: seen for one in origins for call, seen in one.calls.items()}
        rows, level = max(one.rows for one in origins), max(one.level for one in origins)
        old = [(one.level, one.statistic.born, one.statistic) for one in origins if one.statistic]
        last = max(old, key=lambda one: one[:2])[2] if old else None
        reduces = name in _STATISTICS or name.endswith(("_loss", "cross_entropy"))
        for result in tensors_in(args[0] if name == "__setitem__" else made):
            own = level
            if reduces and _over_rows(given[0], result) and not _counts(name, given[0]):
                own = max(own, _STATISTIC)
                if last is None or level == _SAMPLES:
                    last = Statistic(frozenset(calls), rows, max(calls.values()), self.backwards)
            if own >= _STATISTIC and not result.requires_grad:
                own = _CONSTANT
            self.note(result, _Origin(own, calls, rows, last))


def _counts(name: str, given: Tensor) -> bool:
    """True for a sum of integers, or of zeros and ones."""
    whole = not given.is_floating_point() or bool(((given == 0) | (given == 1)).all())
    return whole and name in ("sum", "nansum")


def _over_rows(given: Tensor, result: Tensor) -> bool:
    """True if a reduction was over the first dimension, of several samples."""
    return given.dim() > 0 and len(given) > 1 and result.shape[:1] != given.shape[:1]
