"""The gradient noise scale, from the norm of a window's first micro-batch and of the whole.

The gradient of one unit is G + noise, and the noise has covariance Σ. The sum A of the gradients of
N units has, on average,

    |A|² = N² |G|² + N tr Σ,  so  |A|²/N = tr Σ + N |G|²

The gradients after the first micro-batch are those of its u units alone, and the close takes the
norm of all N. Each of k ranks has a first micro-batch of its own. With m = Σ |A_i|²/u_i over them,
U = Σ u_i and w = |A|²/N of the whole window and all ranks,

    |G|² = (w − m/k) / (N − U/k)        tr Σ = m/k − (U/k) |G|²

Both are unbiased for any sizes, and need one norm more than the window takes anyway. (With one rank
this is McCandlish et al.'s pair of a small and a big batch.)

The noise scale tr Σ / |G|² is the batch at which an update has as much noise as signal (McCandlish
et al. 2018, arXiv:1812.06162). Training with that batch takes twice the minimal number of updates
and twice the minimal amount of data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from operator import mul, truediv
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from wholebatch.batch.samples import is_positive
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.losses.loss import SINGLE, Units
from wholebatch.window.close import dense_gradients, read_scalars

if TYPE_CHECKING:
    from wholebatch.window.window import Step, Window


_Z = 1.96  # For the 95% interval.
_AGREE = 2.0  # Stretches of windows that differ by fewer standard deviations agree.


@dataclass(frozen=True)
class Observation:
    """The estimate from one window: unbiased, but very noisy."""

    spread: float
    """An estimate of tr Σ, the variance of one unit's gradient over all parameters."""
    signal: float
    """An estimate of |G|², the square of the true gradient's norm."""
    units: float
    """The units of the window, over all ranks."""
    micro_batches: int
    """The micro-batches of the window, over all ranks."""

    @property
    def square(self) -> float:
        """Return |gradient of the window|², the sum of signal and noise."""
        return self.signal + self.spread / self.units

    @staticmethod
    def of(
        sums: Sequence[float], *, norm: float, units: float, micro_batches: int
    ) -> Observation | None:
        """Estimate from the first micro-batches and the whole sum; None if they are the same.

        `sums` are m = Σ |A|²/u, U = Σ u and k of the ranks' first micro-batches.
        """
        if sums[2] == 0:
            return None
        moment, first = sums[0] / sums[2], sums[1] / sums[2]
        if units - first < 1e-9 * units:
            return None
        signal = (norm * norm / units - moment) / (units - first)
        spread = moment - first * signal
        if not (math.isfinite(spread) and math.isfinite(signal)):
            return None
        return Observation(spread, signal, units, micro_batches)


@dataclass(frozen=True)
class NoiseScale:
    """The critical batch in units, with its uncertainty.

    >>> noise = NoiseScale(4096.0, 3000.0, 6000.0, spread=8.0, signal=0.002, samples=40,
    ...                    batch=512.0, micro_batches=8)
    >>> noise.verdict
    'enlarge'
    >>> noise.advice("tokens").partition(",")[0]
    'enlarge the batch: at 512 tokens an update it is far below the critical 4'
    """

    critical: float
    """tr Σ / |G|²; inf if |G|² cannot be distinguished from zero."""
    low: float
    high: float
    """The 95% interval, by Fieller's theorem; `high` is inf if |G|² may be zero."""
    spread: float
    signal: float
    samples: int
    """The number of windows in the estimate."""
    batch: float
    """The present units of a window."""
    micro_batches: int
    """The present micro-batches of a window, over all ranks."""

    @property
    def verdict(self) -> str:
        """Return `enlarge`, `keep` or `stop accumulating`; `keep` if uncertain."""
        if 2.0 * self.batch < self.low:
            return "enlarge"
        if self.batch > 2.0 * self.high:
            return "stop accumulating"
        return "keep"

    def advice(self, unit: str = "units") -> str:
        """Return the verdict in words, with the numbers behind it."""
        here = f"{_said(self.batch)} {unit} an update"
        interval = self._interval()
        if self.verdict == "enlarge":
            return (
                f"enlarge the batch: at {here} it is far below the critical {interval}, so twice "
                "the batch makes nearly twice the progress an update"
            )
        if self.verdict == "stop accumulating":
            own = self.batch / max(1, self.micro_batches)
            needed = max(1, math.ceil(self.critical / own))
            instead = (
                "one micro-batch is enough: stop accumulating"
                if needed == 1
                else f"{needed} of the {self.micro_batches} micro-batches would do: accumulate less"
            )
            return (
                f"{instead}; at {here} the batch is far above the critical {interval}, and more "
                "of it makes an update hardly better"
            )
        if self.high > 8.0 * max(self.low, 1.0):
            return (
                f"keep the batch: at {here}, the critical {interval} is not known well yet, from "
                f"{self.samples} windows"
            )
        return f"keep the batch: {here} is near the critical {interval}"

    def _interval(self) -> str:
        if math.isinf(self.critical):
            return f"one, which is at least {_said(self.low)}"
        if math.isinf(self.high):
            return f"{_said(self.critical)} (at least {_said(self.low)})"
        return f"{_said(self.critical)} ({_said(self.low)} to {_said(self.high)})"


class Estimator:
    """Averages observations, newer ones with more weight, and bounds the ratio of the averages.

    The weights halve every `half_life` windows. The half-life doubles, and doubles again, as long
    as earlier windows agree with the newer ones. If all windows agree, all have equal weight: a
    value that does not change is known better the longer it is observed.
    """

    def __init__(self, *, half_life: float = 32.0, most: int = 1024) -> None:
        self._half_life = half_life
        self._most = most
        self.seen: list[Observation] = []
        # The last observation used, and the estimate.
        self._told: tuple[Observation, NoiseScale] | None = None

    def add(self, observation: Observation) -> None:
        self.seen.append(observation)
        if len(self.seen) > self._most:
            del self.seen[: self._most // 4]

    def estimate(self) -> NoiseScale | None:
        """Return the estimate from the windows so far; None for fewer than two.

        It is asked for in every window. So it is recomputed only when the number of windows has
        grown by about 1/16. That depends on the number alone, so that a resumed run gives the same
        values.
        """
        number = len(self.seen)
        told = self.seen[: number - number % max(1, number // 16)]
        if len(told) < 2:
            return None
        if self._told is None or self._told[0] is not told[-1]:
            self._told = told[-1], self._estimate(told)
        return self._told[1]

    def _estimate(self, seen: Sequence[Observation]) -> NoiseScale:
        squares = [one.square for one in seen]
        sizes = _sizes(squares)
        spreads = [one.spread / size for one, size in zip(seen, sizes, strict=True)]
        signals = [one.signal / size for one, size in zip(seen, sizes, strict=True)]
        shortest = _fading(len(seen), self._half_life)
        recent = Averages.of(spreads, signals, shortest)
        low, high = fieller(recent, z=student(recent.count - 1.0))
        # The interval covers the newest windows and their drift; the estimate within it may rest on
        # more.
        weights = _fading(len(seen), _half_life(spreads, signals, self._half_life))
        found = Averages.of(spreads, signals, weights)
        if not low <= found.ratio <= high:
            weights, found = shortest, recent
        size = _dot(weights, squares) / _dot(weights, map(truediv, squares, sizes))
        return NoiseScale(
            critical=found.ratio,
            low=low,
            high=high,
            spread=found.above * size,
            signal=found.below * size,
            samples=len(seen),
            # The last window alone may be the short one at the end of an epoch.
            batch=median(one.units for one in seen[-5:]),
            micro_batches=int(median(one.micro_batches for one in seen[-5:])),
        )


def _half_life(above: Sequence[float], below: Sequence[float], shortest: float) -> float:
    """Return the half-life to average tr Σ (above) and |G|² (below) with.

    It is doubled while two stretches of one length, the newest windows and those before them, give
    the same ratio, and infinite if the older half of all windows agrees with the newer one.
    """
    half_life, number, half = shortest, 0, len(above) // 2
    while shortest <= half and number < half:
        number = min(int(2 * half_life), half)
        new, old = slice(-number, None), slice(-2 * number, -number)
        even = [1.0] * number
        if not Averages.of(above[new], below[new], even).agrees_with(
            Averages.of(above[old], below[old], even)
        ):
            break
        half_life = math.inf if number == half else 2 * half_life
    return half_life


def _fading(number: int, half_life: float) -> list[float]:
    """Return weights that halve every `half_life` windows; the newest is last, and 1."""
    decay = 0.5 ** (1.0 / half_life)
    return [decay**age for age in range(number - 1, -1, -1)]


def _dot(some: Iterable[float], others: Iterable[float]) -> float:
    return float(sum(map(mul, some, others)))


@dataclass(frozen=True)
class Averages:
    """Averages of tr Σ (above) and |G|² (below), with their variances and covariance.

    `count` is the number of equally weighted windows with the same information. All of this is made
    of Python's numbers: a hundred of them are quicker than a call of torch.
    """

    above: float
    below: float
    var_above: float
    var_below: float
    cov: float
    count: float = math.inf

    @staticmethod
    def of(above: Sequence[float], below: Sequence[float], weights: Sequence[float]) -> Averages:
        """Return the weighted averages of both."""
        total = sum(weights)
        x, y = _dot(weights, above) / total, _dot(weights, below) / total
        xs = [weight * (one - x) for weight, one in zip(weights, above, strict=True)]
        ys = [weight * (one - y) for weight, one in zip(weights, below, strict=True)]
        count = total * total / _dot(weights, weights)
        per = (count - 1.0) / count * total * total
        return Averages(x, y, _dot(xs, xs) / per, _dot(ys, ys) / per, _dot(xs, ys) / per, count)

    @property
    def ratio(self) -> float:
        if self.above > 0.0 and self.below > 0.0:
            return self.above / self.below
        return math.inf if self.above > 0.0 else 0.0

    def agrees_with(self, other: Averages) -> bool:
        """True if the ratios are equal: above × other.below − other.above × below is but noise."""
        gap = self.above * other.below - other.above * self.below
        variance = sum(
            b.below**2 * a.var_above - 2 * b.below * b.above * a.cov + b.above**2 * a.var_below
            for a, b in ((self, other), (other, self))
        )
        return gap * gap <= _AGREE**2 * variance


def _sizes(squares: Sequence[float]) -> list[float]:
    """Return the size of each window's |gradient|², taken from its neighbours, to divide it by.

    Gradients shrink a hundredfold in the first updates, which would dominate plain averages. A
    window's own size is correlated with its estimate; its neighbours' sizes are not. So the ratio
    of the averages stays unbiased.
    """
    logs = [math.log(max(square, 1e-300)) for square in squares]
    before, after = [logs[1], *logs[:-1]], [*logs[1:], logs[-2]]  # The ends have one neighbour.
    return [math.exp((one + other) / 2) for one, other in zip(before, after, strict=True)]


def fieller(of: Averages, *, z: float) -> tuple[float, float]:
    """Return the interval of a ratio above/below ≥ 0 of two averages; infinite if below may be 0.

    It contains all ratios r with (above − r below)² ≤ z² Var(above − r below): a quadratic in r.
    """
    above, below = of.above, of.below
    a = below * below - z * z * of.var_below
    b = above * below - z * z * of.cov
    c = above * above - z * z * of.var_above
    root = math.sqrt(max(0.0, b * b - a * c))
    if a > 0.0 and below > 0.0:
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    if c <= 0.0 or above <= 0.0:
        return 0.0, math.inf
    # `below` may be zero, `above` may not: start at the one positive root of the quadratic.
    return (max(0.0, (b - root) / a) if a else c / (2.0 * b) if b > 0.0 else 0.0), math.inf


def student(freedom: float) -> float:
    """Return the two-sided 95% point of Student's t, by its expansion around the normal's."""
    z, v = _Z, max(freedom, 1.0)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _said(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


_log = logging.getLogger("wholebatch")
_AT_FIRST, _OFTEN, _RARELY, _MICRO_BATCHES = 24, 4, 32, 64
"""The norms that "auto" takes often; the windows between them then, and later at most."""


@dataclass(frozen=True)
class Look:
    """The measurements of a window on this rank, still on the device."""

    norm: Tensor | float | None = None  # Of the gradients after the first micro-batch.
    units: Units = 0.0  # Of that micro-batch.
    seed: Tensor | float = 1.0  # The gradients are those of the sum times this.
    whole: Tensor | float | None = None  # The norm at the end, if the close does not report it.
    micro_batches: int = 0


class Probe:
    """Measures one window in `every`, or in what "auto" makes it; all others are left alone.

    In a measured window the norm of the gradients is taken once more, after the first micro-batch.
    With several ranks there is one more small collective. No bit of the update changes, nothing is
    copied, and nothing is read from the device before the window is closed.
    """

    def __init__(
        self, every: int | Literal["auto"], window: Window, *, coupled: bool = False
    ) -> None:
        self._window = window
        self._every = every
        if every != "auto" and not is_positive(every):
            raise OptionError(
                f'noise={every!r}: must be "auto", or every how many windows to look at one'
            )
        self.off = _hindrance(window, coupled)
        """The reason why nothing is measured, or None."""
        if self.off is not None and every != "auto":
            raise UnsupportedError(f"noise={every}: {self.off}")
        if self.off is not None:
            _log.info("the gradient noise scale is not measured: %s", self.off)
        self._estimator = Estimator()
        self._norm: Tensor | float | None = None
        self._newest: Observation | None = None
        self._has_terms = False
        self.active = False

    def begin(self) -> None:
        """Begin a window, or begin it again."""
        window, every = self._window, self._interval()
        # Skip the first window: it may be atypical (graphs are made in it).
        is_due = (window.updates + window.skipped) % every == 1 % every
        self.active = is_due and self.off is None
        self._norm = None

    def _interval(self) -> int:
        """Return the number of windows of which one is measured; all ranks have the same.

        A norm reads every gradient once, and a micro-batch takes many times as long. So once in a
        number of micro-batches is a small part of the time for any batch.
        """
        if self._every != "auto":
            return self._every
        measured = self._measured()
        if len(measured) < _AT_FIRST:
            return _OFTEN
        own = measured[-1].micro_batches / self._window.sync.ranks
        return max(1, min(_RARELY, int(_MICRO_BATCHES / own)))

    def _measured(self) -> list[Observation]:
        return self._estimator.seen + ([] if self._newest is None else [self._newest])

    @torch.no_grad()
    def micro_batch_done(self, done: int) -> None:
        """Take the norm after the gradient of the first micro-batch was added."""
        if done == 1:
            self._norm = self._norm_so_far() if self.active else None
            self._estimate_anew()

    def _estimate_anew(self) -> None:
        """Take in the last measured window, in the one after it: the device is busy meanwhile."""
        if self._newest is not None:
            self._estimator.add(self._newest)
            self._newest = None
            self._estimator.estimate()

    def _norm_so_far(self) -> Tensor | None:
        gradients = dense_gradients(self._window.current.inputs)
        return self._window.sync.total_norm(gradients) if gradients else None

    @torch.no_grad()
    def look(self) -> Look | None:
        """Return the measurements of the window, before its close clears them."""
        if not self.active:
            return None
        window, sync = self._window.current, self._window.sync
        self._has_terms = bool(set(window.units) - {SINGLE})
        units = window.units.get(SINGLE)
        changed = bool(self._window.hooks)  # The reported norm is that after the user's hooks.
        if self._has_terms or not units or self._norm is None or (changed and sync.ranks > 1):
            return Look()
        seed = window.seed if window.known is None else 1.0 / window.known[SINGLE]
        seed = seed * window.loss_scale * window.averaged_by
        whole = self._norm_so_far() if changed else None
        return Look(self._norm, units[0], seed, whole, window.micro_batches)

    def closed(self, look: Look | None, step: Step) -> None:
        """Add the measurements of a closed window. All ranks call this, or none."""
        self._estimate_anew()  # A rank without data, or a resumed window, has not.
        if not self.active:
            return
        self._norm, sync = None, self._window.sync
        joined, look = look is None, look or Look()
        norm, units, seed, whole = read_scalars(
            [0.0 if look.norm is None else look.norm, look.units, look.seed, look.whole or 0.0]
        )
        # A rank without data says nothing, and one whose micro-batch had no units neither.
        unseen = look.norm is None and not joined
        square = (norm / seed) ** 2
        moment = square / units if units else 0.0
        sums = [moment, units, float(units > 0), float(look.micro_batches)]
        numbers = sync.sum([*sums, float(self._has_terms), float(unseen)])
        self._has_terms = numbers[4] > 0
        if self._has_terms:  # All ranks stop, or none.
            self.off = "the loss has several terms, each over units of its own"
            _log.warning("the gradient noise scale is not measured: %s", self.off)
        if step.skipped is not None or self.off is not None or numbers[5]:
            return
        whole = step.grad_norm * step.units if look.whole is None else whole / seed
        self._newest = Observation.of(
            numbers[:3], norm=whole, units=step.units, micro_batches=int(numbers[3])
        )

    @property
    def estimate(self) -> NoiseScale | None:
        """Return the estimate from the windows before the last one, if any."""
        return None if self.off is not None else self._estimator.estimate()

    def state_dict(self) -> dict[str, Any]:
        """Return everything measured so far."""
        return {
            "seen": [list(astuple(one)) for one in self._measured()],
            "taken in": len(self._estimator.seen),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._norm = None
        if state is not None:
            seen = [Observation(*one) for one in state["seen"]]
            self._estimator.seen = seen[: state["taken in"]]
            self._newest = seen[-1] if len(seen) > state["taken in"] else None


def _hindrance(window: Window, coupled: bool) -> str | None:
    if coupled:
        return (
            "the samples of a batch depend on each other (exact BatchNorm, wb.Coupled), so no "
            "micro-batch has a gradient of its own"
        )
    if window.sync.hides_gradients is not None:
        return window.sync.hides_gradients
    if window.calls_on_gradient and window.sync.ranks > 1:
        return "on_gradient= may change the gradient of all ranks before its norm is taken"
    return None
