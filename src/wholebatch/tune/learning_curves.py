"""Runs beside each other over the same data: which batch learns faster, and at which rate.

`learn` trains once with a batch size of its own; `rival` holds the accumulated batch against its
micro-batch without a window; `range_test` raises the learning rate until the loss diverges.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from wholebatch.errors import NonFiniteError, OptionError
from wholebatch.plain_files import finite, write_json
from wholebatch.tune.batch_scaling import AutoBatch, Follow
from wholebatch.tune.window_timing import Make, PeakMeter
from wholebatch.whole_batch import WholeBatch

Take: TypeAlias = Callable[[int], Any]
"""Returns the next so many samples, as one batch."""

Watch: TypeAlias = Callable[[str, int, int], object]  # of the name, updates made, all updates

_UNTIMED = 3  # Windows in which graphs are made and memory is taken.
_POINTS = 60
_LOOKS = 16  # At held-out data, in a run.


@dataclass(frozen=True)
class Contender:
    """A way to use the data: the samples of an update, and what follows them."""

    name: str
    batch: int
    largest: int | None = None
    """The batch grows up to this, with the critical batch; None if it stays."""
    betas: str = "keep"
    rate: float = 1.0
    """Times the learning rate that the rule gives."""


@dataclass(frozen=True)
class Recipe:
    """The parts of a run that all contenders share.

    `source()` returns a new function `take(samples)` that begins at the start of the same data.
    `schedule(optimizer, steps)` returns a learning-rate scheduler. The optimizer's rate and betas
    are those for `base_batch`; the rate follows by `rule`.
    """

    make: Make
    loss: Callable[[Any, Any], Any]
    source: Callable[[], Take]
    micro_batch: int
    base_batch: int
    rule: str = "sqrt"
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    held_out: Callable[[torch.nn.Module], float] | None = None
    """Returns the mean loss over data that no run learns from."""


@dataclass(frozen=True)
class Update:
    """One update of a run: the samples before it, their mean loss, and its time."""

    samples: int
    loss: float
    units: float
    seconds: float


@dataclass(frozen=True)
class LearningCurve:
    """A run: what it learned from how much data, in how many updates, and its cost."""

    contender: Contender
    sizes: tuple[int, ...]
    updates: tuple[Update, ...]
    peak: int
    """The most bytes alive at one moment."""
    held_out: tuple[tuple[int, int, float], ...] = ()
    """Updates and samples so far, and the loss on held-out data, if the recipe has any."""
    critical: tuple[float, ...] = ()
    """The critical batch in samples at these updates, as far as it was measured."""

    @property
    def loss(self) -> float:
        """The mean loss of the last tenth of the data, before it was learned from."""
        return self._trailing()[-1][1]

    def _trailing(self) -> list[tuple[int, float]]:
        """Return the mean loss of the last tenth of the data, from every update on that has one."""
        tenth = self.updates[-1].samples / 10
        found, first = [], 0
        for last, update in enumerate(self.updates):
            while self.updates[first].samples < update.samples - tenth:
                first += 1
            if update.samples >= tenth:
                found.append((last, _mean(self.updates[first : last + 1])))
        return found

    @property
    def seconds(self) -> float:
        """The time of all updates; those that made graphs count as the ones after them."""
        timed = self.updates[_UNTIMED:] or self.updates
        return sum(u.seconds for u in timed) * len(self.updates) / len(timed)

    def points(self) -> list[tuple[int, float]]:
        """Return the samples seen and the mean loss, in at most 60 stretches of the data."""
        end = self.updates[-1].samples + 1
        stretches: dict[int, list[Update]] = {}
        for update in self.updates:
            stretches.setdefault(update.samples * _POINTS // end, []).append(update)
        return [(part[-1].samples, _mean(part)) for part in stretches.values()]

    def reaches(self, loss: float) -> tuple[int, int] | None:
        """Return the updates and the samples after which the loss is this low, or None.

        The loss is the mean over the last tenth of the data.
        """
        last = next((last for last, found in self._trailing() if found <= loss), None)
        return None if last is None else (last + 1, self.updates[last].samples)


def learn(
    contender: Contender, recipe: Recipe, *, samples: int, watch: Watch = lambda *_: None
) -> LearningCurve:
    """Train over this many samples; the learning-rate schedule follows samples, not updates."""
    model, optimizer = recipe.make()
    for group in optimizer.param_groups:
        group["lr"] *= contender.rate
    auto = AutoBatch(contender.batch, contender.largest or contender.batch)
    steps = max(1, samples // contender.batch)
    scheduler = None if recipe.schedule is None else recipe.schedule(optimizer, steps)
    follow = Follow(
        optimizer, base_batch=recipe.base_batch, rule=recipe.rule, betas=contender.betas
    )
    size = min(recipe.micro_batch, contender.batch)
    train = WholeBatch(
        model, optimizer, loss=recipe.loss, micro_batch=size, scheduler=scheduler, **recipe.options
    )
    held_out: list[tuple[int, int, float]] = []
    critical: list[float] = []
    if contender.largest is not None:
        train.measure_noise()
    take, memory = recipe.source(), PeakMeter(next(model.parameters()).device)
    memory.reset()
    made: list[Update] = []
    sizes: list[int] = []
    while auto.done < steps:
        watch(contender.name, auto.done, steps)
        batch = take(auto.batch)
        follow.set(auto.batch, gain=auto.gain)
        began = time.perf_counter()
        step = train.step(batch)
        seconds = time.perf_counter() - began
        made.append(Update(auto.done * auto.first, step.loss, step.units, seconds))
        sizes.append(auto.batch)
        auto.advance(scheduler)
        noise, each = train.noise, step.units / auto.batch
        auto.after(step.units, noise, optimizer.param_groups[0]["lr"])
        is_due = auto.done * _LOOKS >= (len(held_out) + 1) * steps
        if recipe.held_out is not None and is_due:
            held_out.append((len(made), auto.done * auto.first, recipe.held_out(model)))
            critical += [] if noise is None else [noise.critical / each]
    peak = memory.peak(lambda: train.step(batch), model, optimizer)
    looks = tuple(held_out), tuple(critical)
    return LearningCurve(contender, tuple(sizes), tuple(made), peak, *looks)


def samples_in(seconds: float, recipe: Recipe, batch: int) -> int:
    """Return the samples that updates of this batch would take so many seconds for."""
    tried = learn(Contender("", batch), recipe, samples=batch * (_UNTIMED + 3))
    return max(8, int(seconds / (tried.seconds / len(tried.updates)))) * batch


def rival(
    recipe: Recipe, *, samples: int, rates: Sequence[float] = (1.0,), watch: Watch
) -> list[LearningCurve]:
    """Return the runs of the accumulated batch and of its micro-batch alone, at every rate.

    Alone, a micro-batch gets the learning rate of the rule, and the β2 with the same half-life in
    tokens (Marek et al. 2025, arXiv:2507.07101).
    """
    if recipe.micro_batch >= recipe.base_batch:
        raise OptionError(
            f"a batch of {recipe.base_batch} in micro-batches of {recipe.micro_batch} is not "
            "accumulated: give a smaller micro-batch"
        )
    _, optimizer = recipe.make()
    has_betas = all("betas" in group for group in optimizer.param_groups)
    found = []
    for rate in rates:
        at = "" if rate == 1.0 else f", rate × {rate:g}"
        betas = "beta2" if has_betas else "keep"
        for contender in (
            Contender(f"accumulated{at}", recipe.base_batch, rate=rate),
            Contender(f"micro-batch alone{at}", recipe.micro_batch, betas=betas, rate=rate),
        ):
            found.append(learn(contender, recipe, samples=samples, watch=watch))
    return found


@dataclass(frozen=True)
class RangeTest:
    """The loss while the learning rate rises by a constant factor (Smith 2017, arXiv:1506.01186).

    `steepest` is the rate at which the smoothed loss falls fastest, `lowest` the one at which it is
    lowest; above `diverges`, if any, it is more than twice the lowest.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    steepest: float
    lowest: float
    diverges: float | None


def range_test(
    recipe: Recipe, *, low: float, high: float, updates: int = 100, watch: Watch = lambda *_: None
) -> RangeTest:
    """Train with rates from `low` to `high`, and stop when the loss has doubled."""
    if not 0 < low < high or updates < 10:
        raise OptionError(
            f"low={low:g}, high={high:g}, updates={updates}: must be 0 < low < high, over at least "
            "10 updates"
        )
    model, optimizer = recipe.make()
    own = [float(group["lr"]) for group in optimizer.param_groups]
    train = WholeBatch(
        model, optimizer, loss=recipe.loss, micro_batch=recipe.micro_batch, **recipe.options
    )
    take = recipe.source()
    rates: list[float] = []
    smooth: list[float] = []
    average, diverges = 0.0, None
    for update in range(updates):
        rate = low * (high / low) ** (update / (updates - 1))
        watch(f"raising the learning rate from {low:.3g} to {high:.3g}", update, updates)
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate * lr / own[0]
        try:
            loss = train.step(take(recipe.base_batch)).loss
        except NonFiniteError:
            if not update:  # no rate has made it so
                raise
            loss = math.inf
        average = 0.8 * average + 0.2 * loss
        found = average / (1 - 0.8 ** (update + 1))
        if smooth and not found < 2 * min(smooth):
            diverges = rate
            break
        rates.append(rate)
        smooth.append(found)
    # Over a tenth of the way, and not in the first tenth, which is not smooth yet.
    over = max(1, len(smooth) // 10)
    slopes = [b - a for a, b in zip(smooth[over:], smooth[2 * over :], strict=False)]
    steepest = rates[over + slopes.index(min(slopes)) + over // 2] if slopes else rates[0]
    lowest = rates[smooth.index(min(smooth))]
    return RangeTest(tuple(rates), tuple(smooth), steepest, lowest, diverges)


@dataclass(frozen=True)
class Curves:
    """Curves with a table and what they say, as a file and a page show them."""

    title: str
    x: str
    y: str
    curves: list[dict[str, Any]]
    """Each has a `name`, and its points as `x` and `y`."""
    rows: list[dict[str, Any]]
    advice: list[str]
    about: dict[str, Any] = field(default_factory=dict)
    log_x: bool = False

    def write(self, path: Path) -> None:
        write_json(path, finite(asdict(self)))


def _mean(updates: Sequence[Update]) -> float:
    units = math.fsum(update.units for update in updates)
    return math.fsum(update.loss * update.units for update in updates) / units
