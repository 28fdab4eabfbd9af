"""Compare the updates that a function makes from the same samples, cut in other ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

import torch

from wholebatch.errors import OptionError
from wholebatch.split_invariance.causes import Layout, constant_factor, name_factors
from wholebatch.split_invariance.observed_run import Observed, Run, Tensors, Train, observe
from wholebatch.split_invariance.rank_jobs import observe_on

_FLOAT64 = 1e-10
_DOUBTFUL = 0.1
"""An error above this is no rounding, whatever the precision."""
Observe = Callable[[int, Sequence[Run]], list[list[Observed]]]


@dataclass(frozen=True)
class Split:
    """How far the update of a split is from that of the first one."""

    micro_batch: int
    ranks: int
    error: float
    """The largest relative L2 distance of a tensor."""
    tensor: str
    update: float
    """The relative L2 distance of the parameters' whole movement."""
    same: bool


@dataclass(frozen=True)
class SplitReport:
    """Whether an update depends on how its samples are cut, and why."""

    same: bool
    compared: str
    splits: list[Split] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = [f"{'Same update' if self.same else 'Another update'} ({self.compared})"]
        for split in self.splits:
            off = f"{split.error:.1e} in {split.tensor}, whole update {split.update:.1e}"
            mark = "same " if split.same else "OTHER"
            lines.append(f"  {mark} {Layout(split.micro_batch, split.ranks)}: {off}")
        return "\n".join([*lines, *(f"cause: {cause}" for cause in self.causes)])


def split_invariance(
    train: Train,
    *,
    micro_batches: Sequence[int] = (8, 4, 1),
    ranks: Sequence[int] = (1,),
    tolerance: float | None = None,
) -> SplitReport:
    """Return whether `train` makes the same update of the same samples, however they are cut.

    See `wholebatch.testing.assert_split_invariant`.
    """
    for name, numbers in (("micro_batches", micro_batches), ("ranks", ranks)):
        if not numbers or any(type(number) is not int or number < 1 for number in numbers):
            raise OptionError(f"{name}={numbers!r}: must be positive numbers, the first undivided")
    if len(micro_batches) * len(ranks) < 2:
        raise OptionError(f"micro_batches={micro_batches!r}, ranks={ranks!r}: give two splits")

    def observe_runs(number: int, runs: Sequence[Run]) -> list[list[Observed]]:
        if tuple(ranks) == (1,):
            return [[observe(train, run)] for run in runs]
        return observe_on(number, [(train, run) for run in runs])

    first, samples = Layout(micro_batches[0], ranks[0]), max(micro_batches)
    every = {
        number: observe_runs(number, [Run(size) for size in (*micro_batches, micro_batches[0])])
        for number in ranks
    }
    of_each_rank = [observed for shown in every.values() for run in shown for observed in run]
    if not all(observed.gradients for observed in of_each_rank):
        for observed in of_each_rank:
            observed.gradients.clear()  # of some runs only: they cannot be compared
    runs = {
        Layout(size, number): shown
        for number in ranks
        for size, shown in zip(micro_batches, every[number], strict=False)
    }
    right, again = merged(runs[first]), merged(every[ranks[0]][-1])
    noise, tensor = distance(again.judged, right.judged)
    allowed = tolerance or (
        _FLOAT64 if right.dtype is torch.float64 else float(torch.finfo(right.dtype).eps) ** 0.5
    )
    if noise > allowed:
        cause = (
            f"{first} run twice differs by {noise:.1e} in {tensor}: each run draws other numbers "
            "or data. Build everything in train(), from fixed seeds"
        )
        return SplitReport(False, _compared(right), causes=[cause])
    splits = []
    for layout in [*runs][1:]:
        changed = merged(runs[layout])
        error, tensor = distance(changed.judged, right.judged)
        moved = distance(*({"": _flat(each.updates.values())} for each in (changed, right)))[0]
        same = error <= max(allowed, 10 * noise) and moved <= allowed**0.5
        splits.append(Split(*layout, error, tensor, moved, same))
    other = [split for split in splits if not split.same]
    causes = _causes(other, runs, right, observe_runs, samples, allowed) if other else []
    if tolerance is None and any(split.error < _DOUBTFUL for split in other):
        causes.append("or rounding, of autocast for example: then pass tolerance=")
    gaps = {layout: _between_ranks(shown) for layout, shown in runs.items()}
    drift = [layout for layout, (gap, _) in gaps.items() if gap > allowed]
    if drift:
        gap, tensor = gaps[drift[0]]
        causes.append(
            f"the ranks end with other parameters ({gap:.1e} in {tensor}) after {drift[0]}: what "
            "one of them has added is not reduced"
        )
    return SplitReport(not causes, _compared(right), splits, causes)


def merged(ranks: Sequence[Observed]) -> Observed:
    """Return what all ranks have shown; of a tensor that several hold, what the first one has."""
    whole = replace(ranks[0], values={}, gradients={}, updates={})
    for observed in reversed(ranks):
        whole.values.update(observed.values)
        whole.gradients.update(observed.gradients)
        whole.updates.update(observed.updates)
    return whole


def distance(changed: Tensors, right: Tensors) -> tuple[float, str]:
    """Return the largest relative L2 distance of a tensor, and its name.

    It is relative to the tensor's norm, or to a hundredth of what is usual among all tensors: a
    gradient that is 0 but for rounding differs by any factor.
    """
    like = {**changed, **right}
    if any(changed[name].shape != right[name].shape for name in changed.keys() & right.keys()):
        return float("inf"), "the shapes"
    usual = (
        float(_flat(right.values()).norm()) / max(1, sum(t.numel() for t in right.values())) ** 0.5
    )
    worst = 0.0, "any tensor"
    for name, tensor in like.items():
        a, b = (each.get(name, torch.zeros_like(tensor)) for each in (changed, right))
        least = max(float(b.norm()), 0.01 * usual * tensor.numel() ** 0.5)
        gap = float((a - b).norm())
        error = gap / least if least else gap
        worst = max(worst, (error if error == error else float("inf"), name))
    return worst


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(each.flatten() for each in tensors)])


def _compared(right: Observed) -> str:
    if right.gradients:
        return "compared: gradients before clipping, and the parameters' movement"
    what = "the parameters' movement" if right.updates else "what train() returned"
    if right.steps or right.updates:
        what += "; no gradients were seen, and clipping or Adam hide a factor: return them too"
    return f"compared: {what}"


def _between_ranks(ranks: Sequence[Observed]) -> tuple[float, str]:
    """Return the largest distance of a tensor that several ranks hold."""
    gaps = [(0.0, "")]
    for observed in ranks[1:]:
        both = observed.values.keys() & ranks[0].values.keys()
        gaps.append(
            distance(*({name: each.values[name] for name in both} for each in (observed, ranks[0])))
        )
    return max(gaps)


def _causes(
    other: Sequence[Split],
    runs: Mapping[Layout, Sequence[Observed]],
    right: Observed,
    observe_runs: Observe,
    samples: int,
    allowed: float,
) -> list[str]:
    wrong = [Layout(split.micro_batch, split.ranks) for split in other]
    changed = {layout: merged(runs[layout]) for layout in wrong}
    most = max(changed.values(), key=lambda observed: (observed.steps, observed.clips))
    if most.steps != right.steps:
        return [
            f"the optimizer steps {most.steps} times, and {right.steps} times with the first split"
        ]
    if right.gradients and all(split.error <= allowed for split in other):
        return [
            "the gradients agree and the movements do not: the learning rate, weight decay or "
            "another part of the step depends on the split"
        ]
    factors = {each: constant_factor(changed[each].judged, right.judged) for each in wrong}
    known = {layout: factor for layout, factor in factors.items() if factor is not None}
    causes = [name_factors(known, samples)] if known else []
    rest = [layout for layout in wrong if layout not in known]
    if rest and not causes:
        with suppress(Exception):  # a watch may disturb a trainer
            [watched] = observe_runs(rest[-1].ranks, [Run(rest[-1].micro_batch, watches=True)])
            causes = [f"by wb.watch, {line}" for line in {w.verdict for w in watched} if line][:1]
    if most.clips > max(right.clips, right.steps):
        causes.append(
            f"gradients are clipped {most.clips} times for {right.steps} update(s): clip once, "
            "when all micro-batches are added"
        )
    worst = max(other, key=lambda split: split.error)
    return causes or [f"not known; most is off in {worst.tensor}, by {worst.error:.1e}"]
