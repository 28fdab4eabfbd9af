"""The gradient noise scale, from the gradient norms of a first micro-batch and of its window.

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
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from statistics import median

import torch
from torch import Tensor

from wholebatch.batch.samples import is_positive
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.losses.loss import SINGLE, Units
from wholebatch.whole_batch import Observer, WholeBatch
from wholebatch.window.close import dense_gradients, read_scalars
from wholebatch.window.window import Step

_log = logging.getLogger("wholebatch")
_FEWEST = 8
"""The fewest windows of an estimate."""
_Z = 2.1
"""Standard errors on each side of the 95% interval, for about 20 windows or more."""


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
    'enlarge the batch: 512 tokens an update are far below the critical 4'
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
        here, interval = f"{_said(self.batch)} {unit} an update", self._interval()
        if self.verdict == "enlarge":
            return f"enlarge the batch: {here} are far below the critical {interval}"
        if self.verdict == "stop accumulating":
            own = self.batch / max(1, self.micro_batches)
            needed = max(1, math.ceil(self.critical / own))
            return (
                f"accumulate less: {here} are far above the critical {interval}, and {needed} of "
                f"the {self.micro_batches} micro-batches would do"
            )
        if self.high > 8.0 * max(self.low, 1.0):
            return (
                f"keep the batch of {here}: the critical {interval} is not known well yet, from "
                f"{self.samples} windows"
            )
        return f"keep the batch: {here} are near the critical {interval}"

    def _interval(self) -> str:
        above = "or more" if math.isinf(self.high) else f"to {_said(self.high)}"
        return f"{_said(self.critical)} ({_said(self.low)} {above})"


class Estimator:
    """Averages of both estimates over the last windows, and an interval for their ratio.

    Old windows are dropped: the scale grows while a model learns. Each window is divided by the
    size of the window before it. Gradients shrink a hundredfold in the first updates, which would
    dominate plain averages. The size of another window does not depend on this one's estimate, so
    the ratio stays unbiased.
    """

    def __init__(self, *, most: int = 256) -> None:
        self.windows: deque[Observation] = deque(maxlen=most)

    def estimate(self) -> NoiseScale | None:
        """Return the estimate from the windows so far; None for fewer than 8."""
        windows, count = self.windows, len(self.windows)
        if count < _FEWEST:
            return None
        sizes = [max(window.square, 1e-300) for window in (windows[0], *islice(windows, count - 1))]
        pairs = [(w.spread / size, w.signal / size) for w, size in zip(windows, sizes, strict=True)]
        x, y = (sum(values) / count for values in zip(*pairs, strict=True))
        products = [((a - x) ** 2, (b - y) ** 2, (a - x) * (b - y)) for a, b in pairs]
        variances = (sum(values) / (count - 1) / count for values in zip(*products, strict=True))
        low, high = fieller(x, y, *variances, z=_Z)
        ratio = x / y if x > 0.0 and y > 0.0 else math.inf
        recent = list(windows)[-5:]  # the last alone may be the short one at the end of an epoch
        return NoiseScale(
            critical=ratio if x > 0.0 else 0.0,
            low=low,
            high=high,
            spread=sum(window.spread for window in windows) / count,
            signal=sum(window.signal for window in windows) / count,
            samples=count,
            batch=median(window.units for window in recent),
            micro_batches=int(median(window.micro_batches for window in recent)),
        )


def fieller(
    above: float, below: float, var_above: float, var_below: float, cov: float, *, z: float
) -> tuple[float, float]:
    """Return the interval of a ratio above/below ≥ 0 of two averages; infinite if below may be 0.

    It contains all ratios r with (above − r below)² ≤ z² Var(above − r below): a quadratic in r.
    """
    a = below * below - z * z * var_below
    b = above * below - z * z * cov
    c = above * above - z * z * var_above
    root = math.sqrt(max(0.0, b * b - a * c))
    if a > 0.0 and below > 0.0:
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    if c <= 0.0 or above <= 0.0:
        return 0.0, math.inf
    # `below` may be zero, `above` may not: start at the one positive root of the quadratic.
    return (max(0.0, (b - root) / a) if a else c / (2.0 * b) if b > 0.0 else 0.0), math.inf


def _said(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


class NoiseProbe(Observer):
    """Measures one window in `every` of a `WholeBatch`; all others are left alone.

    In a measured window the norm of the gradients is taken once more, after the first micro-batch.
    With several ranks there is one more small collective. No bit of the update changes, nothing is
    copied, and nothing is read from the device before the window is closed.

    >>> import torch, wholebatch as wb
    >>> from wholebatch.tune import NoiseProbe
    >>> model = torch.nn.Linear(3, 2)
    >>> train = wb.WholeBatch(
    ...     model, torch.optim.SGD(model.parameters()), micro_batch=4,
    ...     loss=lambda model, micro: wb.cross_entropy(model(micro[0]), micro[1]),
    ... )
    >>> noise = NoiseProbe(train, every=1)
    >>> for _ in range(9):
    ...     step = train.step((torch.randn(8, 3), torch.randint(0, 2, (8,))))
    >>> noise.estimate.samples
    9

    Args:
        train: The windows to measure.
        every: Measure one window of this many.
    """

    def __init__(self, train: WholeBatch, every: int = 8) -> None:
        if not is_positive(every):
            raise OptionError(f"NoiseProbe(every={every!r}): must be a positive number of windows")
        _refuse_unmeasurable(train)
        self._ledger = train._ledger
        self._every = every
        self._estimator = Estimator()
        self._measured: tuple[Tensor, Tensor | float, Units] | None = None
        """Of the first micro-batch, on the device: the norm of the gradients, the factor that they
        hold beside the sum of the losses' gradients, and the units."""
        self._warned = False
        self.active = False
        train.observers.append(self)

    def begin(self) -> None:
        """Begin a window, or begin it again."""
        # Skip the first window: it may be atypical (graphs are made in it).
        number = self._ledger.updates + self._ledger.skipped
        self.active = number % self._every == 1 % self._every
        self._measured = None

    def defers_reduction(self, micro_batches: int) -> bool:
        """True in a measured window of one micro-batch: its norm is taken before the reduction."""
        return self.active and micro_batches == 1

    @torch.no_grad()
    def micro_batch_done(self, done: int) -> None:
        """Measure after the gradient of the first micro-batch was added."""
        if done != 1 or not self.active:
            return
        window = self._ledger.current
        gradients = dense_gradients(window.inputs)
        units = self._ledger.micro_batches[0].units.get(SINGLE)
        if units is None and not self._warned:
            self._warned = True
            _log.warning(
                "the gradient noise scale is not measured: the loss has several terms, each over "
                "units of its own"
            )
        if gradients and units is not None and not self._ledger.hooks:
            scale = window.seed * window.loss_scale * window.averaged_by
            self._measured = self._ledger.sync.norm(gradients), scale, units

    def closed(self, step: Step, *, joined: bool) -> None:
        """Add the measurements of a closed window. All ranks call this, or none.

        A rank that only `joined` has no micro-batch, and adds nothing.
        """
        if not self.active:
            return
        moment = first = 0.0
        if self._measured is not None:
            norm, scale, first = read_scalars(self._measured)
            moment = (norm / scale) ** 2 / first if first else 0.0
        unseen = self._measured is None and not joined
        numbers = self._ledger.sync.group.sum(
            [moment, first, float(first > 0), float(step.micro_batches), float(unseen)]
        )
        if step.skipped is not None or numbers[4]:
            return
        estimate = Observation.of(
            numbers[:3],
            norm=step.grad_norm * step.units,
            units=step.units,
            micro_batches=int(numbers[3]),
        )
        if estimate is not None:
            self._estimator.windows.append(estimate)

    @property
    def estimate(self) -> NoiseScale | None:
        """Return the estimate from the windows so far, if there are enough."""
        return self._estimator.estimate()

    def state_dict(self) -> list[list[float]]:
        """Return the measured windows, to save beside the state of the `WholeBatch`."""
        return [list(astuple(window)) for window in self._estimator.windows]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Go on with the windows that were measured before."""
        for spread, signal, units, micro_batches in state:
            window = Observation(spread, signal, units, int(micro_batches))
            self._estimator.windows.append(window)


def _refuse_unmeasurable(train: WholeBatch) -> None:
    """Refuse windows in which no rank sees the gradient of its own first micro-batch."""
    ledger, why = train._ledger, None
    if not ledger.sync.adds_to_parameters:
        why = (
            "with this engine no rank has the gradient of its own micro-batches; measure in one "
            "process, or with DDP"
        )
    if train._runner.needs_every_rank() is not None:
        why = (
            "the samples of a batch depend on each other (exact BatchNorm, wb.Coupled), so no "
            "micro-batch has a gradient of its own"
        )
    elif ledger.hooks.calls:
        why = "on_gradient= may change the gradient before its norm is taken"
    if why is not None:
        raise UnsupportedError(f"NoiseProbe: {why}")
