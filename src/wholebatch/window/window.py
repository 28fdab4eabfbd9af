"""A window: the value that begins one update, and how it ends.

Every micro-batch's backward starts from a *seed*, the same number for the whole window and for all
ranks, and adds `seed × d(total)` into the gradients. It is a power of two near `1 / units`, so that
multiplying by it does not round: of all units, if they were counted before (`known`), else of the
window before or of the first micro-batch. The close knows the units and corrects with one factor. A
loss of several terms has a seed for each, `weight / units` of the term.

The end of a window is four functions over values:

1. `add_up` sums the totals and units of all micro-batches and ranks. The sums stay on the device.
2. `decide` normalises and clips the gradients (`close_gradients`), reads the numbers, and says
   whether the update may be made.
3. `apply` steps optimizers, schedulers and the average, or leaves the gradients to the user.
4. `report` returns the Step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.distributed import Sync
from wholebatch.distributed.sync_strategy import OTHER_SETTINGS
from wholebatch.errors import (
    EmptyWindowError,
    LossError,
    NonFiniteError,
    RankError,
)
from wholebatch.losses.loss import SINGLE
from wholebatch.window.close import (
    DeferredHooks,
    Reading,
    Store,
    Sums,
    check_counts,
    close_gradients,
    column,
)
from wholebatch.window.close_options import CloseOptions
from wholebatch.window.micro_batch import MicroBatch, refuse_units
from wholebatch.window.model_and_optimizer import Schedules, Target


@dataclass(frozen=True, repr=False)
class Step:
    """The report of one update: its exact mean loss, its units and its gradient norm.

    Attributes:
        update: The number of updates so far, this one included.
        loss: The mean over all units of the window and of all ranks.
        units: These units.
        grad_norm: The norm of the normalised gradient, after `on_gradient=` and before clipping.
        micro_batches: The micro-batches of this rank.
        seconds: The time of the window on the host's clock.
        clip: The factor by which clipping multiplied the gradient.
        loss_scale: The GradScaler's scale in this window; 1 without one.
        terms: The mean of each term of a `wb.Loss.terms`, by name.
        skipped: The reason when no update was made, else None.
    """

    update: int
    loss: float
    units: float
    grad_norm: float
    micro_batches: int
    seconds: float
    clip: float = 1.0
    loss_scale: float = 1.0
    terms: Mapping[str, float] = field(default_factory=dict)
    skipped: str | None = None

    def __repr__(self) -> str:
        text = f"loss={self.loss:.6g}, units={self.units:g}, grad_norm={self.grad_norm:.4g}"
        text += f", micro_batches={self.micro_batches}, seconds={self.seconds:.3g}"
        text += f", skipped={self.skipped!r}" if self.skipped else ""
        return f"Step(update={self.update}, {text})"


@dataclass(frozen=True, eq=False)
class Window:
    """One update while its micro-batches are added: fixed when it begins."""

    groups: list[list[nn.Parameter]]
    """The parameters that are trained, by parameter group."""
    known: Mapping[str, float] | None
    """All units by term, if they were counted over the window and all ranks before."""
    seed: float | Tensor
    averaged_by: float = 1.0
    """The engine divides the reduced gradient by this."""
    scaling: float = 1.0
    """The loss scale in every backward."""
    loss_scale: float = 1.0
    """The part of it that the close undoes; a library may undo it by itself."""
    started: float = field(default_factory=perf_counter)
    inputs: list[nn.Parameter] = field(init=False)
    """The parameters, without their groups."""
    has_terms: bool = field(init=False)
    """True if each term is divided by its own units, which were counted before."""

    def __post_init__(self) -> None:
        inputs = [parameter for group in self.groups for parameter in group]
        object.__setattr__(self, "inputs", inputs)
        has_terms = self.known is not None and self.known.keys() != {SINGLE}
        object.__setattr__(self, "has_terms", has_terms)

    def seed_of(self, name: str, weight: float) -> float | Tensor:
        """Return the number that the backward of a term's total starts from."""
        seed = self.seed * weight
        if self.known is not None and self.has_terms:
            units = self.known[name]
            seed = seed / units if units else 0.0
        return seed * (self.averaged_by * self.scaling)


def is_tested_window(number: int) -> bool:
    """Return True for windows 1, 2, 4, 8, ...; the first window of a run has number 1.

    The loss must add up and graphs must compute what eager code does in every window. A mistake may
    show only in later data (padding, a rare class) or after the weights have moved. Testing at
    powers of two costs ten tests in 1,000 windows.

    >>> [number for number in range(1, 20) if is_tested_window(number)]
    [1, 2, 4, 8, 16]
    """
    return number > 0 and number & (number - 1) == 0


@dataclass(frozen=True)
class Training:
    """What the windows of a run train, and how."""

    target: Target
    options: CloseOptions
    sync: Sync
    store: Store
    hooks: DeferredHooks
    schedules: Schedules


@dataclass(frozen=True)
class Decision:
    """What is to become of a window; numbers on the host."""

    loss: float
    units: float
    grad_norm: float
    clip: float = 1.0
    terms: Mapping[str, float] | None = None
    """The mean of each term; None if the loss has one term only."""
    skipped: str | None = None
    """The reason for making no update; None if it is to be made."""


# ---------------------------------------------------------------------------- add up


def add_up(
    window: Window,
    micro_batches: Sequence[MicroBatch],
    training: Training,
    weights: Mapping[str, float],
    filled_in: Collection[int] = (),
) -> Sums:
    """Return totals and units of each term over the window and all ranks (one collective).

    `weights` are those of the terms. `filled_in` are the ids of the parameters that had no gradient
    here before the reduction.
    """
    names = sorted(weights)
    device = training.target.device
    totals = [column(_totals(micro_batches, name), device) for name in names]
    units = [column([m.units[name] for m in _with(micro_batches, name)], device) for name in names]
    total = torch.stack([each.sum() for each in totals])
    # Units that are not valid on this rank must stop the update of every rank.
    count = torch.stack([torch.where(each >= 0, each, math.nan).sum() for each in units])
    if training.sync.ranks > 1:
        total, count = _over_ranks(window, training, total, count, filled_in)
    # A number that is not finite makes the sum so: one test instead of two.
    is_valid = (total.sum() + count.sum()).isfinite() & (count.max() > 0)
    if window.known is not None and window.known.keys() == set(names):
        known = column([window.known[name] for name in names], count.device)
        is_valid &= torch.isclose(count, known, rtol=1e-6, atol=0.0).all()
    divisor = torch.ones_like(count[0]) if window.has_terms else count.max()
    normalise = 1.0 / (divisor * window.seed) / window.loss_scale
    by_name = {name: weights[name] for name in names}
    return Sums(by_name, totals, units, total, count, is_valid, normalise)


def _with(micro_batches: Sequence[MicroBatch], name: str) -> list[MicroBatch]:
    """Return the micro-batches that have a term."""
    return [micro for micro in micro_batches if name in micro.units]


def _totals(micro_batches: Sequence[MicroBatch], name: str) -> list[Any]:
    return [total for micro in micro_batches for total in micro.totals(name)]


def number_of(micro_batches: Sequence[MicroBatch]) -> int:
    """Return how many of them had a backward that counts."""
    return sum(micro.index >= 0 and bool(micro.parts) for micro in micro_batches)


def _over_ranks(
    window: Window, training: Training, total: Tensor, count: Tensor, filled_in: Collection[int]
) -> tuple[Tensor, Tensor]:
    """Return totals and counts summed over the ranks.

    With them go a digest of this rank's settings, and which parameters have a gradient here: one
    that has none on any rank keeps none, as for the undivided batch.
    """
    sync = training.sync
    shared = sync.stepped(window.inputs) if sync.peers is sync.group else []
    present = [float(id(parameter) not in filled_in) for parameter in shared]
    ours = float(training.target.digest(training.options) & 0xFFF) if shared else 0.0
    local = [*total.tolist(), *count.tolist()]
    values = sync.group.sum([*local, ours, ours * ours, *present])
    total, count = column(values[: len(local)], total.device).chunk(2)
    digests, squares, *counts = values[len(local) :]
    if squares * sync.ranks != digests * digests:  # equal only of equal numbers
        raise RankError(OTHER_SETTINGS)
    for parameter, ranks_with_gradient in zip(shared, counts, strict=True):
        if ranks_with_gradient == 0:
            parameter.grad = None
    return total, count


# ---------------------------------------------------------------------------- decide


def decide(
    window: Window,
    micro_batches: Sequence[MicroBatch],
    training: Training,
    sums: Sums,
    *,
    number: int,
    while_waiting: Callable[[], object] | None = None,
) -> Decision:
    """Normalise and clip the gradients, read the numbers, and say what is to become of the window.

    `number` is that of the update. `while_waiting()` is called where the host waits for the device.
    """
    store, hooks, sync = training.store, training.hooks, training.sync
    holders = sync.holders(window.groups)
    closed = close_gradients(holders, sums, training.options, hooks, total_norm=sync.norm)
    reading = Reading(*closed, sums.totals, sums.units, *sums.own_totals, *sums.own_units)
    if while_waiting is not None:
        while_waiting()
    (norm,), (clip,), (is_valid,), sum_of, units_of, *columns = reading.wait()
    names = list(sums.weights)
    totals_of_each, units_of_each = columns[: len(names)], columns[len(names) :]
    for name, units_of_term in zip(names, units_of_each, strict=True):
        refuse_units(units_of_term, _with(micro_batches, name))
    count = max(units_of)
    if math.isnan(count):
        raise LossError("another rank has units that are negative or not finite")
    if count == 0.0:
        return _without_units(micro_batches, training.options)
    if window.known is not None:
        check_counts(window.known, dict(zip(names, units_of, strict=True)))
    means = {
        name: total / units if units else 0.0
        for name, total, units in zip(names, sum_of, units_of, strict=True)
    }
    if norm == 0.0:
        store.refuse_nothing()
    if hooks.calls and sync.ranks > 1:
        _refuse_other_norm(training, norm)
    skipped = None
    if not is_valid:
        are_finite = all(map(math.isfinite, sum_of))
        owners = [[m.index for m in micro_batches for _ in m.totals(name)] for name in names]
        finite = zip(chain(*owners), chain(*totals_of_each), strict=True)
        bad = [owner for owner, total in finite if not math.isfinite(total)]
        of = number_of(micro_batches)
        skipped = _not_finite(window, training, bad, of, are_finite, number)
    return Decision(
        loss=math.fsum(sums.weights[name] * means[name] for name in names),
        units=count,
        grad_norm=norm,
        clip=clip if is_valid else 1.0,
        terms=means if names != [SINGLE] else None,
        skipped=skipped,
    )


def _without_units(micro_batches: Sequence[MicroBatch], options: CloseOptions) -> Decision:
    if options.zero_units == "raise":
        raise EmptyWindowError(
            f"all {number_of(micro_batches)} micro-batches of this window have zero units (every "
            "label is ignored or every weight is zero), so its mean does not exist: filter "
            "such batches, or pass close=wb.Close(zero_units='skip') to skip and count them"
        )
    return Decision(loss=math.nan, units=0.0, grad_norm=0.0, skipped="no units")


def _refuse_other_norm(training: Training, norm: float) -> None:
    """Refuse an `on_gradient` that has made other gradients here than on another rank."""
    norm = norm if math.isfinite(norm) else math.inf
    both = torch.tensor([norm, -norm], dtype=torch.float64, device=training.target.device)
    most, least = training.sync.group.largest(both).tolist()
    if not math.isclose(most, -least, rel_tol=1e-6):
        raise RankError(
            f"on_gradient= has made gradients of norm {most:g} on one rank and {-least:g} on "
            "another, so the models would drift apart: it must do the same on every rank "
            "(draw noise from a torch.Generator with one seed for all)"
        )


def _not_finite(
    window: Window,
    training: Training,
    culprits: Sequence[int],
    of: int,
    are_finite: bool,
    number: int,
) -> str:
    """Return the reason for skipping, or raise the error; the same on all ranks.

    `culprits` are the micro-batches whose losses are not finite, `of` so many.
    """
    culprit = min((index for index in culprits if index >= 0), default=None)
    scale, sync = training.target.scale, training.sync
    if scale is not None and scale.enabled and are_finite:
        return f"gradients not finite at loss scale {window.loss_scale:g}"
    bad, where = "a loss that is not finite", "the losses are finite but the gradients are not"
    if training.hooks.calls:
        where += " (or on_gradient= has made them so)"
    if culprit is not None:
        on = f" on rank {sync.rank}" if sync.ranks > 1 else ""
        where = f"micro-batch {culprit + 1} of {of}{on} has {bad}"
    elif not are_finite:
        where = f"{'the batch' if culprits else 'another rank'} has {bad}"
    if training.options.nonfinite == "skip":
        return where
    raise NonFiniteError(
        f"update {number}: {where}. Nothing was updated: parameters and optimizer "
        "state are as before this window; pass close=wb.Close(nonfinite='skip') to skip and "
        "count such updates",
        micro_batch=culprit,
    )


# ---------------------------------------------------------------------------- apply, report


def apply(decision: Decision, training: Training, *, steps: bool) -> None:
    """Step the optimizers, schedulers and the average; without `steps`, leave the gradients.

    A window that is skipped changes nothing but the loss scale.
    """
    if decision.units == 0.0:
        return
    target, is_valid = training.target, decision.skipped is None
    if is_valid and not steps:
        training.store.hand_over()
    elif is_valid:
        training.store.update()
        training.schedules.step(decision.loss)
        if target.ema is not None and target.averaged is not None:
            target.ema.update_parameters(target.averaged)
    if target.scale is not None:
        target.scale.update(finite=is_valid)
    training.sync.after_update()


def report(
    window: Window, micro_batches: Sequence[MicroBatch], decision: Decision, updates: int
) -> Step:
    """Return the Step of a window, after so many updates."""
    return Step(
        update=updates,
        loss=decision.loss,
        units=decision.units,
        grad_norm=decision.grad_norm,
        micro_batches=number_of(micro_batches),
        seconds=perf_counter() - window.started,
        clip=decision.clip,
        loss_scale=window.loss_scale,
        terms=decision.terms or {},
        skipped=decision.skipped,
    )
