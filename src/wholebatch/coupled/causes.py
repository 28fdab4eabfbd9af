"""Why the loss of some samples is not that of their halves: named, with the way out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.splitting.layout import Layout, take
from wholebatch.core.splitting.structure import flatten
from wholebatch.coupled.sample_runs import Few, Run, Tolerance, Uncheckable
from wholebatch.errors import LossError

__all__ = [
    "FUNCTION",
    "Finding",
    "by_changing_a_sample",
    "couples",
    "of_gradient",
    "of_loss",
    "origins",
    "outside_norm",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One layer, attribute or function: its name, its class, how it was found and what to do."""

    name: str
    type: str
    kind: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name or '(the model itself)'} ({self.type}): {self.advice}"


_TOLERANCE = 1e-5

FUNCTION = "(the function itself)"
"""Stands for the name of a module where it is the forward function, and none of the modules."""

_Rows = tuple[list[Tensor], list[Tensor]]
_Traced = dict[tuple[str, int], _Rows]


def origins(few: Few, count: int, known: Collection[str] = ()) -> list[str]:
    """Return the modules whose output for one sample moves when another sample changes.

    A module is named if what it was given for the unchanged samples stayed the same and what it
    gave back for them did not: the origin, not all that lies behind it. Of nested modules, the
    innermost; `FUNCTION`, if it is in no module. Those that are `known` are left out. The first
    `count` samples run three times, without a backward; of every output two numbers per sample are
    kept.
    """
    if count < 2:
        return []
    found = [name for name in _origins_of(few, count) if name not in known]
    if found and count > 2:
        # A dimension that happens to be as long as the samples are many is told by another
        # number of them.
        fewer = _origins_of(few, count - 1)
        found = [name for name in found if name in fewer]
    return found


def _origins_of(few: Few, count: int) -> list[str]:
    plain, changed = _few(few.layout, count, change=False), _few(few.layout, count, change=True)

    def traced(batch: Any, *, graph: bool = False) -> _Traced:
        few.start.restore()
        few.fixed.begin()
        with torch.set_grad_enabled(graph):
            return _Trace(few.model, few.run, batch, count).rows

    try:
        first, graph = traced(plain), False
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a function that takes gradients itself (a gradient penalty)
        first, graph = traced(plain, graph=True), True
    return _origins(first, traced(plain, graph=graph), traced(changed, graph=graph))


def _origins(before: _Traced, again: _Traced, after: _Traced) -> list[str]:
    origins: list[str] = []
    for key, (inputs, outputs) in before.items():
        if key not in after or key not in again:
            continue  # the path through the model depends on the sample itself
        noise = _distance(outputs, again[key][1])
        given = _distance(inputs, after[key][0])
        got = _distance(outputs, after[key][1])
        name = key[0]
        inside = bool(origins) if name == FUNCTION else _is_around(name, origins)
        if given <= _TOLERANCE and got > _TOLERANCE + 10 * noise and not inside:
            origins.append(name)
    return origins


def _is_around(name: str, others: Sequence[str]) -> bool:
    """Whether a module of that name is one of the others, or holds one."""
    return any(other == name or other.startswith(f"{name}." if name else "") for other in others)


def _few(layout: Layout, count: int, *, change: bool) -> Any:
    """A batch of the first samples; changed, the first of them is another one."""
    values = []
    for leaf, batched in zip(layout.leaves, layout.batched, strict=True):
        value = leaf.value
        if batched:
            value = take(value, slice(0, count))
            value = _replaced_first(value) if change else value
        values.append(value)
    return layout.structure.build(values)


def _replaced_first(value: Any) -> Any:
    # Another sample's values are valid ones whatever they mean: pixels, token numbers, labels.
    if not isinstance(value, Tensor):
        if isinstance(value, (list, tuple)):
            return type(value)([value[1], *value[1:]])
        changed = copy.deepcopy(value)
        changed[0] = value[1]
        return changed
    other = next((k for k in range(1, len(value)) if not torch.equal(value[k], value[0])), None)
    changed = value.detach().clone()
    if other is not None:
        changed[0] = value[other]
    elif value.is_floating_point():
        changed[0] = value[0] + 1
    return changed


class _Trace:
    """Per call of a module: what stands for its inputs' and outputs' rows of all samples but one.

    A row is kept as its norm and its product with a fixed vector of signs: what would take the
    memory of all activations takes two numbers per sample.
    """

    def __init__(self, model: nn.Module, run: Callable[[Any], Any], batch: Any, count: int) -> None:
        self.rows: _Traced = {}
        self._count = count
        self._signs: dict[tuple[int, torch.device], Tensor] = {}
        calls: dict[str, int] = {}
        entered: list[list[Tensor]] = []

        def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
            entered.append(self._others((args, kwargs)))

        def leaving(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                index = calls[name] = calls.get(name, -1) + 1
                self.rows[name, index] = (entered.pop(), self._others(output))

            return hook

        handles = []
        try:
            for name, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(entering, with_kwargs=True))
                handles.append(module.register_forward_hook(leaving(name), with_kwargs=True))
            torch.manual_seed(0)
            with suppress(LossError):  # a loss function's result cannot lead back from here
                self.rows[FUNCTION, 0] = ([], self._others(run(batch)))
        finally:
            for handle in handles:
                handle.remove()

    def _others(self, tree: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for leaf in flatten(tree)[0]:
            tensor = leaf.value
            if (
                isinstance(tensor, Tensor)
                and tensor.dim()
                and tensor.shape[0] == self._count
                and tensor.layout is torch.strided
            ):
                found.append(self._digest(tensor.detach()[1:]))
        return found

    def _digest(self, rows: Tensor) -> Tensor:
        if not rows.numel():
            return rows.new_zeros(2, dtype=torch.float64)
        if rows.is_complex():
            rows = torch.view_as_real(rows)
        if not rows.is_floating_point():
            rows = rows.float()
        flat = rows[:, None, None]
        if rows.dim() > 1:
            flat = rows.reshape(len(rows), -1, rows.shape[-1])
        size = torch.linalg.vector_norm(flat, dim=(1, 2), dtype=torch.float64)
        mixed = (flat @ self._signs_of(flat)).double()
        places = torch.arange(1, flat.shape[1] + 1, device=flat.device).double()
        return torch.cat([size, (mixed * places.sqrt()).sum(1)])

    def _signs_of(self, rows: Tensor) -> Tensor:
        key = (rows.shape[-1], rows.device)
        if key not in self._signs:
            made = torch.Generator().manual_seed(rows.shape[-1])
            signs = torch.randint(0, 2, (rows.shape[-1],), generator=made) * 2.0 - 1.0
            self._signs[key] = signs.to(rows.device)
        return self._signs[key].to(rows.dtype)


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference relative to the largest value; inf where shapes differ."""
    if len(a) != len(b):
        return float("inf")
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        if left.shape != right.shape:
            return float("inf")
        gap = (left.double() - right.double()).abs().max()
        worst = max(worst, float(gap / left.double().abs().max().clamp_min(1e-30)))
    return worst


_COUPLES = (
    "Either it, or the model under it, compares samples or lets the batch decide something (a "
    "capacity, a path): what the loss does so belongs into wb.Coupled(encode, loss), which sees "
    "the whole batch. Or it is a mean over other units than those given"
)
_LAYER = (
    "output for one sample moved when another sample changed, for a reason its type does not tell: "
    "no micro-batch can give it the whole batch. If it calls F.batch_norm, make that an "
    "nn.BatchNorm inside it, which is exact; else compute it per sample, or move it into the loss "
    "of wb.Coupled(encode, loss), which sees the whole batch"
)
_LOSS = "(the loss function)"


def of_loss(few: Few, runs: Sequence[Run], tolerance: Tolerance, function: str) -> Finding:
    """Return why the totals of the whole and its halves do not add up, as far as numbers tell."""
    kind, text = _loss(few, runs, tolerance)
    return Finding(_LOSS, function, kind, text)


def of_gradient(few: Few, runs: Sequence[Run], tolerance: Tolerance, function: str) -> Finding:
    """Return why the gradients do not add up although the totals do."""
    gap = tolerance.gradient_gap(runs[0], runs[1:])
    assert gap is not None
    return Finding(_LOSS, function, "gradient", _gradient(few, tolerance, gap))


def couples(runs: Sequence[Run], function: str) -> Finding:
    """Return the finding that the loss couples its samples."""
    return Finding(_LOSS, function, "loss", _apart(runs))


def outside_norm(kind: str, function: str) -> Finding:
    """Return the finding of a BatchNorm in a module that the loss function runs by itself."""
    return Finding(
        _LOSS,
        function,
        "loss",
        f"runs a {kind} in training mode that is not in the model, so that nobody can make it "
        "exact: give all modules that it runs (model=[net, other]; loss(model, micro) is then "
        "given the list), or put that one into evaluation mode",
    )


def by_changing_a_sample(
    few: Few, count: int, function: str, known: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Return the modules whose output for one sample moves with another sample."""
    named = dict(few.model.named_modules())
    return tuple(
        Finding(name, function if name == FUNCTION else type(named[name]).__name__, "probe", _LAYER)
        for name in origins(few, count, known)
    )


def _loss(few: Few, runs: Sequence[Run], tolerance: Tolerance) -> tuple[str, str]:
    whole, first, second = runs
    if not all(run.is_finite for run in runs) or tolerance.adds_up(whole, [first, second]):
        return "loss", _apart(runs)
    seen = (
        f"the loss of {few.count} samples is {whole.total:.6g}, that of their halves "
        f"{first.total:.6g} and {second.total:.6g}"
    )
    if _is_mean(few, runs, tolerance):
        return "mean", (
            f"{seen}: a mean where a sum is expected. Give wb.mean_loss(mean, units), or compute "
            'it with reduction="sum" and give wb.Loss(total, units)'
        )
    if not tolerance.units_add_up(whole, [first, second]):
        return "units", (
            f"the units of {few.count} samples are {whole.units:.6g}, those of their halves "
            f"{first.units:.6g} and {second.units:.6g}: units must add up. Count what the total is "
            "a sum over in the micro-batch itself (samples, or labels that are not ignored)"
        )
    if _is_sum_times_units(runs, tolerance):
        return "sum", (
            f"{seen}: a sum given as a mean, so that it is multiplied by the units once more. Give "
            "wb.Loss(total, units) instead of wb.mean_loss"
        )
    added = _added_once(few, runs, tolerance)
    if added is not None:
        return "added", (
            f"{seen}: {added:.6g} is added once per micro-batch (a regulariser, a penalty on the "
            "weights), so that its share grows with their number. Multiply it by the "
            "micro-batch's units"
        )
    return "loss", _apart(runs)


def _apart(runs: Sequence[Run]) -> str:
    whole, first, second = runs
    mean = whole.total / (whole.units or math.nan)
    apart = (first.total + second.total) / (first.units + second.units or math.nan)
    gap = abs(mean - apart) / max(abs(mean), abs(apart), 1e-300)
    return (
        f"the loss of some samples is {mean:.6g}, of the same in two halves {apart:.6g} (relative "
        f"difference {gap:.0e}). {_COUPLES}{_other_units(runs)}"
    )


def _other_units(runs: Sequence[Run]) -> str:
    """Say that a mean may have other units, if it lies between the means of the halves."""
    if not all(run.units for run in runs):
        return ""
    whole, *halves = (run.total / run.units for run in runs)
    if not min(halves) < whole < max(halves):
        return ""
    return (
        ". If the loss is a mean, its units may be others than what it is the mean over (padding "
        "that is counted): count those"
    )


def _is_mean(few: Few, runs: Sequence[Run], tolerance: Tolerance) -> bool:
    """True if the total is the mean of the halves' totals, by units or by samples."""
    whole, first, second = runs
    size = max(abs(run.total) for run in runs)
    half = few.count // 2
    for a, b in ((first.units, second.units), (float(half), float(few.count - half))):
        mean = (first.total * a + second.total * b) / (a + b) if a + b else math.nan
        if math.isfinite(mean) and tolerance.near(whole.total, mean, size, 0.0):
            return True
    return False


def _is_sum_times_units(runs: Sequence[Run], tolerance: Tolerance) -> bool:
    """True if what adds up is total / units."""
    if not all(run.units for run in runs):
        return False
    whole, first, second = (run.total / run.units for run in runs)
    return tolerance.near(whole, first + second, max(abs(first) + abs(second), abs(whole)), 0.0)


def _added_once(few: Few, runs: Sequence[Run], tolerance: Tolerance) -> float | None:
    """Return what comes once more with every cut; None if it is another amount each time."""
    whole, first, second = runs
    half = few.count // 2
    once = first.total + second.total - whole.total
    try:
        if half < 2:
            return None
        quarters = [few.part(0, half // 2), few.part(half // 2, half)]
    except (torch.OutOfMemoryError, Uncheckable, RuntimeError, ValueError):
        return None
    again = math.fsum(quarter.total for quarter in quarters) - first.total
    size = max(abs(run.total) for run in runs) + abs(once)
    same = abs(once - again) <= 10 * tolerance.relative * abs(once) + tolerance.absolute
    return once if same and abs(once) > tolerance.relative * size else None


def _gradient(few: Few, tolerance: Tolerance, gap: tuple[int, float]) -> str:
    place, by = gap
    name = few.parameters[place][0]
    half = few.count // 2
    once = few.part(0, half, backward=True)
    quarter = few.part(0, half, backward=True, scale=0.25)
    why = (
        "The loss compares its samples by a statistic of them that is detached "
        "(losses / losses.detach().mean(): give wb.Coupled(encode, loss)); or a hook on a tensor "
        "or module, or the backward of an autograd.Function, mixes the samples or counts them; or "
        "a mean was multiplied by other units than it is a mean over"
    )
    if tolerance.gradient_gap(once, [quarter]) is not None:
        why = (
            "A backward from a quarter does not give a quarter: a hook on a tensor or module, or "
            "the backward of an autograd.Function, is not linear (it clips, normalises, or adds)"
        )
    return (
        f"the loss of {few.count} samples is that of their halves, its gradient is not: at "
        f"parameter {name} it differs by {by:.0e} of its norm. {why}. Do that once per update, on "
        "the whole gradient: a hook on the parameter (parameter.register_hook) runs so"
    )
