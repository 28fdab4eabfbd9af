"""The bottleneck of a window with its evidence, and the effect of more micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.settings import Trial

MUCH = 0.25
"""A part that takes more than this fraction of a window is the first suspect."""
SMALL = 0.05
"""An update is launch-bound if one pass over its bytes takes less than this share of it.

An optimizer makes up to ten passes over its bytes, but not twenty.
"""
USED = 0.35
"""The fraction of a large matrix product's speed above which a window is compute-bound."""


@dataclass(frozen=True)
class Fixed:
    """A window's time as `per_step × steps + rest`: the cost of a micro-step of any size."""

    per_step: float
    rest: float
    points: int
    moving: float = 0.0
    """The part of `per_step` to read the parameters twice and write gradients, at copy speed."""

    @property
    def launching(self) -> float:
        """Return the seconds of a micro-step not explained by its samples or its parameters."""
        return max(0.0, self.per_step - self.moving)


REMEDIES = {
    "data": "load with more workers (wholebatch train --workers 4), or keep the data on the device",
    "network": 'more micro-batches per update (a larger --batch-size), sync="hold", a faster link',
    "launch": "larger micro-batches, --execute graph on CUDA, a fused optimizer",
    "memory": "--execute graph or compile, a lower precision; for the update a larger batch or a "
    "fused optimizer",
    "compute": "a lower precision, fewer operations, or more devices",
}
"""The remedy for each bottleneck."""


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck (compute, launch, memory, network or data), with the evidence."""

    kind: str
    evidence: tuple[str, ...]
    utilisation: float | None = None
    """The share of a large matrix product's speed that a whole window reaches."""

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind]


def fixed_cost(trials: Sequence[Trial], *, moving: float = 0.0) -> Fixed | None:
    """Fit a line through the windows of one mode over their number of steps.

    Every window is weighted by its relative error. The cost per micro-step is at most the time of
    the cheapest measured micro-step with its samples, and at most the time of its forward and
    backward. `moving` is the part of it in which parameters and gradients are read and written, in
    seconds.

    >>> from wholebatch.tune.settings import Setting, RunMode
    >>> mode = RunMode("full", False, "eager", "auto")
    >>> def made(micro, steps, seconds):
    ...     return Trial(Setting(micro, mode), steps, "measured", "", seconds=seconds)
    >>> fixed_cost([made(8, 8, 1.8), made(16, 4, 1.4), made(32, 2, 1.2)])
    Fixed(per_step=0.1..., rest=1.0..., points=3, moving=0.0)
    """
    points = [(trial.steps, trial.seconds) for trial in trials if trial.seconds is not None]
    if len({steps for steps, _ in points}) < 2:
        return None
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    common = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    most = [y / x for x, y in points]
    most += [_computing(trial) / trial.steps for trial in trials if _computing(trial)]
    slope = min(max(0.0, common / spread), *most)
    return Fixed(slope, mean_y - slope * mean_x, len(points), min(moving, slope))


def _computing(trial: Trial) -> float:
    """Return the seconds of a window spent on computing micro-batches."""
    return sum(
        trial.split.get(part, 0.0)
        for part in ("forward", "backward", "micro-step", "addition", "idle")
    )


def name_bottleneck(
    trial: Trial, *, fixed: Fixed | None, used: float | None, bandwidth: float | None = None
) -> Bottleneck:
    """Name the bottleneck from the setting's split, the cost of a micro-step and the arithmetic.

    `used` is the share of a large matrix product's speed that forward and backward reach.
    `bandwidth` is the speed of a large copy in bytes per second.
    """
    split, window = trial.split, sum(trial.split.values()) or 1.0
    shares = {name: seconds / window for name, seconds in split.items()}
    evidence = [*_evidence(trial, shares, fixed, used)]
    launching = max(shares.get("idle", 0.0), _launching(trial, fixed))
    closing, moving = shares.get("optimizer", 0.0), 1.0
    if bandwidth and trial.update_bytes and closing > MUCH:
        moving = trial.update_bytes / bandwidth / split["optimizer"]
        evidence.append(
            f"an update reads and writes {bytes_said(trial.update_bytes)} of parameters, gradients "
            f"and optimizer state; once, at a copy's {bandwidth / 1e9:.3g} GB/s, that is "
            f"{min(1.0, moving):.0%} of its time"
        )
    arithmetic = (used or 0.0) * _computing(trial) / window
    kind, why = _kind(shares, launching, closing, arithmetic, moving=moving, used=used)
    utilisation = None if used is None or not split else arithmetic
    return Bottleneck(kind, (*evidence, *why), utilisation)


def _kind(
    shares: Mapping[str, float],
    launching: float,
    closing: float,
    arithmetic: float,
    *,
    moving: float,
    used: float | None,
) -> tuple[str, tuple[str, ...]]:
    """Return the bottleneck and what else speaks for it."""
    data, network = shares.get("data", 0.0), shares.get("communication", 0.0)
    if data > MUCH and data >= max(launching, network):
        return "data", ()
    if network > MUCH:
        return "network", ()
    if launching > max(MUCH, arithmetic):
        return "launch", ()
    if closing > max(MUCH, arithmetic):
        if moving > SMALL:
            return "memory", ()
        return "launch", ("the update is many small operations: not the bytes that they move",)
    if used is None or used >= USED:
        return "compute", ()
    left = "neither arithmetic nor launches take the time: reading and writing tensors does"
    return "memory", (left,)


def _launching(trial: Trial, fixed: Fixed | None) -> float:
    """Return the share of a window that goes into starting its micro-steps; 0 if unknown."""
    if fixed is None or not trial.seconds:
        return 0.0
    return fixed.launching * trial.steps / trial.seconds


def _evidence(
    trial: Trial, shares: Mapping[str, float], fixed: Fixed | None, used: float | None
) -> Iterator[str]:
    """Yield the largest parts of a window, the fixed cost of a micro-step, and the arithmetic."""
    if shares:
        largest = sorted(shares, key=lambda name: -shares[name])[:3]
        parts = (f"{shares[name]:.0%} is {name}" for name in largest if shares[name] >= 0.005)
        yield f"of a window, {', '.join(parts)}"
    if fixed is not None and trial.seconds:
        moved = ""
        if fixed.moving > 0.1 * fixed.per_step > 0:
            share = f"{fixed.moving / fixed.per_step:.0%}"
            moved = f"; {share} of it is what reading and writing the parameters' bytes takes"
        yield (
            f"a micro-step costs {1000 * fixed.per_step:.2f} ms whatever its size, "
            f"{fixed.per_step * trial.steps / trial.seconds:.0%} of the window at {trial.steps} "
            f"step{'' if trial.steps == 1 else 's'} (a line through {fixed.points} sizes{moved})"
        )
    if used is not None:
        yield f"forward and backward reach {used:.0%} of the speed of a large matrix product here"


def accumulation(trial: Trial, *, fixed: Fixed | None, smaller: Trial | None) -> tuple[str, ...]:
    """Return sentences on what more micro-batches would change, and what they would not."""
    window = sum(trial.split.values()) or 1.0
    once = trial.split.get("optimizer", 0.0) + trial.split.get("communication", 0.0)
    said = []
    if fixed is not None and trial.seconds:
        more = fixed.per_step * trial.steps / trial.seconds
        said.append(
            f"Twice as many micro-batches of half the size: the same update, about {more:.0%} more "
            "time" + _less_memory(trial, smaller) + "."
        )
    elif smaller is not None:
        said.append(f"Smaller micro-batches: the same update{_less_memory(trial, smaller)}.")
    least = f"at most {once / window:.0%}" if once / window >= 0.01 else "less than 1%"
    close = "optimizer and reduction" if trial.split.get("communication") else "optimizer"
    if trial.split:
        said.append(
            f"A larger batch of more such micro-batches: no more memory, and {least} less time per "
            f"unit, because more units share one close ({close})."
        )
    return tuple(said)


def _less_memory(trial: Trial, smaller: Trial | None) -> str:
    if smaller is None:
        return ""
    measured = trial.peak and smaller.peak  # a prediction does not count everything
    here, there = (t.peak if measured else t.predicted for t in (trial, smaller))
    if not here or not there or there >= here:
        return ""
    return f", and {bytes_said(there)} instead of {bytes_said(here)} at the peak"
