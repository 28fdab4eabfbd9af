"""The gradient noise scale, measured on micro-batches that are computed anyway.

The gradient of one unit is G + noise, and the noise has covariance Σ. The sum A of the gradients of
N units has, on average,

    |A|² = N² |G|² + N tr Σ

So norms at different N give both, without bias and without a second gradient buffer. There are two
kinds of measurement, each with the mean u tr Σ + q |G|². Eager code shows every micro-batch's own
gradient before it is added: e is its |A|², u its units, and q = u². A graph adds by itself and
shows only the growing sum: e is the growth of |A|² with the micro-batch, u its units, and q the
growth of N². In both cases, weighted least squares over the micro-batches and the whole window, Σ
(e − u tr Σ − q |G|²)² / q → min, gives

    tr Σ = (Σ u e / q − |A|²/N) / (Σ u²/q − 1)        |G|² = |A|²/N² − tr Σ / N

with |A|² and N of the whole window. For own gradients this is the variance of the micro-batches
around their mean, which does not depend on G. For growths it is noisier if the batch is far above
the critical one. The sums of all ranks are added. The weights depend on the units alone, so both
estimates are unbiased for any sizes of micro-batches. (With two micro-batches of one size, this is
McCandlish et al.'s pair of a small and a big batch.)

The noise scale tr Σ / |G|² is the batch at which an update has as much noise as signal (McCandlish
et al. 2018, arXiv:1812.06162). Training with that batch takes twice the minimal number of updates
and twice the minimal amount of data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from wholebatch.core.close import dense_gradients, read_scalars
from wholebatch.core.loss import SINGLE
from wholebatch.core.precision import SIXTEEN_BIT
from wholebatch.distributed.ddp import Replicated
from wholebatch.distributed.sync_strategy import Single
from wholebatch.errors import OptionError, UnsupportedError

if TYPE_CHECKING:
    from wholebatch.core.window import Step, Window


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
    def of(sums: Sums, *, norm: float, units: float) -> Observation | None:
        """Estimate from the sums of all ranks and the whole norm; None for one micro-batch."""
        if sums.weight - 1.0 < 1e-9 or not units > 0.0:
            return None
        whole = norm * norm
        spread = (sums.moment - whole / units) / (sums.weight - 1.0)
        signal = whole / units**2 - spread / units
        if not (math.isfinite(spread) and math.isfinite(signal)):
            return None
        return Observation(spread, signal, units, sums.count)


@dataclass(frozen=True)
class Sums:
    """The sums over a rank's micro-batches that the estimate needs; ranks add them up."""

    moment: float = 0.0  # Σ u e / q
    weight: float = 0.0  # Σ u² / q
    count: int = 0

    @staticmethod
    def of_own(norms: Sequence[float], units: Sequence[float]) -> Sums:
        """Return the sums from each micro-batch's own |A| and units."""
        pairs = [(norm, own) for norm, own in zip(norms, units, strict=True) if own > 0.0]
        moment = math.fsum(norm * norm / own for norm, own in pairs)
        return Sums(moment, float(len(pairs)), len(pairs))

    @staticmethod
    def of_growing(norms: Sequence[float], units: Sequence[float]) -> Sums:
        """Return the sums from |A| of the running sum after each micro-batch, and the units."""
        moment = weight = 0.0
        done = before = 0.0
        count = 0
        for norm, own in zip(norms, units, strict=True):
            if own <= 0.0:
                continue
            grown = (done + own) ** 2 - done**2
            moment += own * (norm * norm - before) / grown
            weight += own * own / grown
            done, before = done + own, norm * norm
            count += 1
        return Sums(moment, weight, count)


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
        self._seen: list[Observation] = []
        # The last observation used, and the estimate.
        self._told: tuple[Observation, NoiseScale] | None = None

    def add(self, observation: Observation) -> None:
        self._seen.append(observation)
        if len(self._seen) > self._most:
            del self._seen[: self._most // 4]

    def estimate(self) -> NoiseScale | None:
        """Return the estimate from the windows so far; None for fewer than two.

        It takes a millisecond and is asked for in every window. So it is recomputed only when the
        number of windows has grown by about 1/64. That depends on the number alone, so that a
        resumed run gives the same values.
        """
        number = len(self._seen)
        told = self._seen[: number - number % max(1, number // 64)]
        if len(told) < 2:
            return None
        if self._told is None or self._told[0] is not told[-1]:
            self._told = told[-1], self._estimate(told)
        return self._told[1]

    def _estimate(self, seen: Sequence[Observation]) -> NoiseScale:
        sizes = _sizes([one.square for one in seen])
        spreads = [one.spread / own for one, own in zip(seen, sizes, strict=True)]
        signals = [one.signal / own for one, own in zip(seen, sizes, strict=True)]
        recent = _averages(spreads, signals, _fading(len(seen), self._half_life))
        low, high = fieller(
            recent.above,
            recent.below,
            recent.var_above,
            recent.var_below,
            recent.cov,
            z=student(recent.count - 1.0),
        )
        # The interval covers the newest windows and their drift; the estimate within it may rest on
        # more.
        weights = _fading(len(seen), _half_life(spreads, signals, self._half_life))
        found = _averages(spreads, signals, weights)
        if not low <= found.ratio <= high:
            weights, found = _fading(len(seen), self._half_life), recent
        squares = math.fsum(w * one.square for w, one in zip(weights, seen, strict=True))
        size = squares / math.fsum(
            w * one.square / own for w, one, own in zip(weights, seen, sizes, strict=True)
        )
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

    def state_dict(self) -> list[list[float]]:
        return [[o.spread, o.signal, o.units, float(o.micro_batches)] for o in self._seen]

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        self._seen = [Observation(o[0], o[1], o[2], int(o[3])) for o in state]


def _half_life(spreads: Sequence[float], signals: Sequence[float], shortest: float) -> float:
    """Return the half-life to average with.

    It is doubled while the earlier windows give the same ratio, and infinite if the older half of
    all windows does too. Two stretches of one length, the newest and the one before it, have the
    averages s, g and s', g' of tr Σ and |G|². If their ratios are equal, s g' − s' g is zero up to
    noise of a known variance.
    """
    half_life = shortest
    half = len(spreads) // 2
    while shortest <= half:
        number = min(int(2 * half_life), half)
        even = [1.0 / number] * number
        new = _averages(spreads[-number:], signals[-number:], even)
        old = _averages(spreads[-2 * number : -number], signals[-2 * number : -number], even)
        gap = new.above * old.below - old.above * new.below
        if gap * gap > _AGREE**2 * (new.gap_variance(old) + old.gap_variance(new)):
            break
        if number == half:
            return math.inf
        half_life *= 2
    return half_life


def _fading(number: int, half_life: float) -> list[float]:
    """Return weights with the sum 1; the newest is last and largest."""
    decay = 0.5 ** (1.0 / half_life)
    raw = [decay**age for age in range(number - 1, -1, -1)]
    total = math.fsum(raw)
    return [weight / total for weight in raw]


@dataclass(frozen=True)
class _Averages:
    """Averages of tr Σ (above) and |G|² (below), with their variances and covariance.

    `count` is the number of equally weighted windows with the same information.
    """

    above: float
    below: float
    var_above: float
    var_below: float
    cov: float
    count: float

    @property
    def ratio(self) -> float:
        if self.above > 0.0 and self.below > 0.0:
            return self.above / self.below
        return math.inf if self.above > 0.0 else 0.0

    def gap_variance(self, other: _Averages) -> float:
        """Return this stretch's share of Var(`above × other.below − other.above × below`)."""
        a, b = other.below, other.above
        return a * a * self.var_above - 2 * a * b * self.cov + b * b * self.var_below


def _averages(
    above: Sequence[float], below: Sequence[float], weights: Sequence[float]
) -> _Averages:
    mean_above = math.fsum(w * value for w, value in zip(weights, above, strict=True))
    mean_below = math.fsum(w * value for w, value in zip(weights, below, strict=True))
    count = 1.0 / math.fsum(weight * weight for weight in weights)
    fair = count / (count - 1.0)
    a = [w * (value - mean_above) for w, value in zip(weights, above, strict=True)]
    b = [w * (value - mean_below) for w, value in zip(weights, below, strict=True)]
    return _Averages(
        mean_above,
        mean_below,
        fair * math.fsum(x * x for x in a),
        fair * math.fsum(x * x for x in b),
        fair * math.fsum(x * y for x, y in zip(a, b, strict=True)),
        count,
    )


def _sizes(squares: Sequence[float]) -> list[float]:
    """Return the size of each window's |gradient|², taken from its neighbours, to divide it by.

    Gradients shrink a hundredfold in the first updates, which would dominate plain averages. A
    window's own size is correlated with its estimate; its neighbours' sizes are not. So the ratio
    of the averages stays unbiased.
    """
    logs = [math.log(max(square, 1e-300)) for square in squares]
    last = len(logs) - 1
    sizes = []
    for place in range(len(logs)):
        beside = [logs[at] for at in (place - 1, place + 1) if 0 <= at <= last]
        sizes.append(math.exp(math.fsum(beside) / len(beside)))
    return sizes


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


_HELD_BYTES = 32 * 2**20
"""The most bytes of gradients that wait to be measured in one kernel."""


class Incoming:
    """Observes every gradient just before it is added to `.grad`, and keeps only norms.

    The hooks are on autograd's accumulation nodes. So they are not among the user's hooks on the
    parameters, which a window removes.
    """

    def __init__(self) -> None:
        # Keep a reference: autograd would otherwise create the node again.
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._held: list[tuple[Tensor | None, ...]] = []
        self._bytes = 0
        self._norms: list[Tensor] = []

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Observe the gradients of these parameters until `detach`."""
        self.detach()
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        # A hook runs for every parameter of every micro-batch: if all gradients fit, it only
        # appends.
        see: Any = self._held.append if whole <= _HELD_BYTES else self._see
        self._handles = [node.register_prehook(see) for node in self._nodes]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._nodes = []  # Drop the nodes: one that ever had a hook keeps calling Python.
        self._held.clear()
        self._norms = []
        self._bytes = 0

    def _see(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._held.append(gradients)
        gradient = gradients[0]
        if gradient is not None:
            self._bytes += gradient.numel() * gradient.element_size()
            if self._bytes > _HELD_BYTES:
                self._look()

    def _look(self) -> None:
        with torch.no_grad():
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for (gradient,) in self._held:
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    gradient = gradient.coalesce().values()
                if gradient.is_complex():
                    gradient = torch.view_as_real(gradient)
                kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
            for (dtype, _), alike in kinds.items():
                wide = torch.float32 if dtype in SIXTEEN_BIT else None
                self._norms += torch._foreach_norm(alike, 2, wide)
        self._held.clear()
        self._bytes = 0

    def take(self) -> Tensor | None:
        """Return the norm of all gradients since the last call; None if there were none."""
        self._look()
        norms, self._norms = self._norms, []
        if not norms:
            return None
        if len({(norm.dtype, norm.device) for norm in norms}) > 1:
            norms = [norm.to(norms[0].device, torch.float64) for norm in norms]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm


Noise: TypeAlias = int | Literal["auto"] | None

_log = logging.getLogger("wholebatch")
_EVERY = 16
"""The interval of "auto". A measured window costs up to a fifth more; one in 16 costs about 1%."""


def check_noise(noise: object) -> Noise:
    """Return the option, or raise an OptionError that says what is allowed."""
    if noise is None or noise == "auto":
        return noise
    if isinstance(noise, bool) or not isinstance(noise, int) or noise < 1:
        raise OptionError(
            f'noise={noise!r}: must be None, "auto", or every how many windows to look at one'
        )
    return noise


@dataclass(frozen=True)
class Look:
    """The measurements of a window on this rank."""

    sums: Sums = field(default_factory=Sums)
    norm: float = 0.0  # The norm of the sum of all its micro-batches' gradients.
    is_whole: bool = True  # True if every micro-batch was seen.


class Probe:
    """Measures one window in `every`; all others are left alone.

    In a measured window the gradients are read once more. With several ranks there is one more
    small collective, and the gradients are reduced at the close instead of during the last
    backward: the norms must be those of the rank's own gradients. No bit of the update changes,
    nothing is copied, and nothing is read from the device before the end of the window.
    """

    def __init__(self, noise: Noise, window: Window, *, coupled: bool = False) -> None:
        self._window = window
        self._every = _EVERY if noise == "auto" else noise
        self.off = "not asked for" if noise is None else _hindrance(window, coupled)
        """The reason why nothing is measured, or None."""
        if self.off is not None and isinstance(noise, int):
            raise UnsupportedError(f"noise={noise}: {self.off}")
        if self.off is not None and noise == "auto":
            _log.info("the gradient noise scale is not measured: %s", self.off)
        self._estimator = Estimator()
        self._incoming = Incoming()
        self._norms: list[Tensor | float] = []
        self._own = True  # True if the norms are those of single micro-batches.
        self._has_terms = False
        self._is_whole = True
        self.active = False

    def begin(self, *, first: int = 0, together: bool = False, own: bool = False) -> None:
        """Begin a window, or begin it again; a resumed one already has `first` micro-batches.

        `together`: the window runs in lock-step, so no micro-batch has a gradient before the last.
        `own`: autograd adds every gradient itself, so it can be observed before.
        """
        window = self._window
        self.end()
        if self._every is not None and self.off is None and not together:
            # Skip the first window: it may be atypical (graphs are made in it).
            self.active = (window.updates + window.skipped) % self._every == 1 % self._every
        if not self.active:
            return
        self._is_whole = first == 0 or (len(self._norms) == first and self._own == own)
        if first == 0:
            self._norms = []
        self._own = own
        if own:
            groups = window.target.groups()
            self._incoming.attach([parameter for group in groups for parameter in group])

    @torch.no_grad()
    def micro_batch_done(self) -> None:
        """Record the norm after the gradient of another micro-batch was added."""
        if not self.active:
            return
        norm = self._incoming.take() if self._own else self._whole_norm()
        self._norms.append(math.nan if norm is None else norm)  # No gradient, so no information.

    def _whole_norm(self) -> Tensor | float:
        gradients = [g for group in self._window.current.groups for g in dense_gradients(group)]
        return self._window.sync.total_norm(gradients) if gradients else 0.0

    @torch.no_grad()
    def look(self) -> Look | None:
        """Return the measurements of the window, before its close clears them."""
        if not self.active:
            return None
        window = self._window.current
        units = window.units.get(SINGLE, [])
        self._has_terms = bool(set(window.units) - {SINGLE})
        if self._has_terms or not self._is_whole or len(units) < len(self._norms):
            return Look(is_whole=False)
        # The buffers hold seed × loss scale × the sum of the units' gradients.
        if window.known is not None:
            scale = window.known[SINGLE] / window.loss_scale
        else:
            scale = 1.0 / (read_scalars([window.seed])[0] * window.loss_scale)
        count = len(self._norms)  # Ignore later micro-batches: they only keep other ranks in step.
        whole = self._whole_norm() if self._window.sync.ranks == 1 else 0.0
        *norms, last = (norm * scale for norm in read_scalars([*self._norms, whole]))
        sums = Sums.of_own if self._own else Sums.of_growing
        return Look(sums(norms, read_scalars(units[:count])), last)

    def closed(self, look: Look | None, step: Step) -> None:
        """Add the measurements of a closed window. All ranks call this, or none."""
        if not self.active:
            return
        self.end()
        self._norms = []
        look = look or Look()
        sums, whole, sync = look.sums, look.norm, self._window.sync
        is_whole = look.is_whole
        if sync.ranks > 1:
            flags = [float(self._has_terms), float(not is_whole)]
            numbers = sync.sum([sums.moment, sums.weight, float(sums.count), *flags])
            sums = Sums(numbers[0], numbers[1], int(numbers[2]))
            self._has_terms, is_whole = numbers[3] > 0, numbers[4] == 0
            whole = step.grad_norm * step.units
        if self._has_terms:  # All ranks stop, or none.
            self.off = "the loss has several terms, each over units of its own"
            _log.warning("the gradient noise scale is not measured: %s", self.off)
        if step.skipped is not None or self.off is not None or not is_whole:
            return
        observation = Observation.of(sums, norm=whole, units=step.units)
        if observation is not None:
            self._estimator.add(observation)

    def end(self) -> None:
        """Stop measuring: the window is over, whatever its outcome."""
        self.active = False
        self._incoming.detach()

    @property
    def estimate(self) -> NoiseScale | None:
        """Return the present estimate of the noise scale, if any."""
        return None if self.off is not None else self._estimator.estimate()

    def state_dict(self) -> dict[str, Any]:
        """Return everything measured so far, even in the middle of a window."""
        norms = [] if self._window.open is None else read_scalars(self._norms)
        return {"seen": self._estimator.state_dict(), "norms": norms, "own": self._own}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._norms = []
        if state is not None:
            self._estimator.load_state_dict(state["seen"])
            self._own = bool(state.get("own", False))
            self._norms = [] if self._window.open is None else list(state["norms"])


def _hindrance(window: Window, coupled: bool) -> str | None:
    if coupled:
        return (
            "the samples of a batch depend on each other (exact BatchNorm, wb.Coupled), so no "
            "micro-batch has a gradient of its own"
        )
    if not isinstance(window.sync, Single | Replicated):
        return (
            "on a sharded model no rank holds the gradient of its own micro-batches; measure on "
            "one process or with DDP"
        )
    if window.calls_on_gradient and window.sync.ranks > 1:
        return "on_gradient= may change the gradient of all ranks before its norm is taken"
    if not window.store.in_grad:
        return 'the gradients are not kept in the device\'s memory; use gradients="device"'
    return None
