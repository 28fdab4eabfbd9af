"""Name the reason why the loss of some samples is not that of their parts, and the way out.

The numbers of a few runs tell a mean from a sum, units that do not add up, and a gradient that a
hook changes. A layer that lets samples act on each other is found by changing one sample.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.samples import flatten, take
from wholebatch.coupled.sample_runs import SCALE, FirstSamples, SampleRun, Uncheckable
from wholebatch.errors import LossError

_COUPLES = (
    "Either it, or the model under it, compares samples or lets the batch decide something (a "
    "capacity, a path): what the loss does so belongs into wb.Coupled(encode, loss), which sees "
    "the whole batch. Or it is a mean over other units than those given"
)
_GROUPS = (
    "If each k neighbouring samples belong together (pairs, groups), take micro-batches of a "
    "multiple of k samples (a trainer that gives micro-batches: of at least 2 * k)"
)
_LAYER = (
    "output for one sample moved when another sample changed, for a reason its type does not tell: "
    "no micro-batch can give it the whole batch. If it calls F.batch_norm, make that an "
    "nn.BatchNorm inside it, which is exact; else compute it per sample, or move it into the loss "
    "of wb.Coupled(encode, loss), which sees the whole batch"
)
_LOSS = "(the loss function)"
_FUNCTION = "(the function itself)"  # in place of a module's name
_MOVED = 1e-5


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One layer, attribute or function: its name, its class, how it was found and what to do."""

    name: str
    type: str
    kind: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name or '(the model itself)'} ({self.type}): {self.advice}"


# --------------------------------------------------------------------- the loss


def outside_norm(name: str, kind: str, where: str = _LOSS) -> AuditFinding:
    """Return the finding of a BatchNorm in a module that the loss function runs by itself."""
    text = (
        f"runs a {kind} in training mode that is not in the model, so that nobody can make it "
        "exact: give all modules that it runs (model=[net, other]; a loss function is then given "
        "the list), or put that one into evaluation mode (a teacher: teacher.eval())"
    )
    return AuditFinding(where, name, "loss", text)


def not_tested(samples: FirstSamples, why: str) -> AuditFinding:
    """Return the finding of a loss that has no value for parts of the samples."""
    text = (
        f"it has a value for {samples.count} samples, but {why}, so that nothing tells whether "
        "micro-batches add up. A loss that needs several samples at once compares them: give "
        f"wb.Coupled(encode, loss). {_GROUPS}"
    )
    return AuditFinding(_LOSS, samples.name, "untested", text)


def loss_cause(
    samples: FirstSamples, runs: Sequence[SampleRun], *, may_run: bool = True
) -> AuditFinding:
    """Return why the totals of the whole and its parts do not add up, as far as numbers tell.

    `may_run`: the samples may run once more, to tell what is added once per micro-batch.
    """
    whole, first, second = runs
    tolerance = samples.tolerance
    if not all(run.is_finite for run in runs) or tolerance.adds_up(whole, [first, second]):
        return samples_compared(samples, runs)
    seen = (
        f"the loss of {samples.count} samples is {whole.total:.6g}, that of their parts "
        f"{first.total:.6g} and {second.total:.6g}"
    )
    if _is_mean(samples, runs):
        kind, text = (
            "mean",
            f"{seen}: a mean where a sum is expected. Give wb.mean_loss(mean, units), or compute "
            'it with reduction="sum" and give wb.Loss(total, units)',
        )
    elif not tolerance.units_add_up(whole, [first, second]):
        kind, text = (
            "units",
            f"the units of {samples.count} samples are {whole.units:.6g}, those of their parts "
            f"{first.units:.6g} and {second.units:.6g}: units must add up. Count what the total is "
            "a sum over in the micro-batch itself (samples, or labels that are not ignored)",
        )
    elif _is_sum_times_units(samples, runs):
        kind, text = (
            "sum",
            f"{seen}: a sum given as a mean, so that it is multiplied by the units once more. Give "
            "wb.Loss(total, units) instead of wb.mean_loss",
        )
    elif may_run and (added := _added_once(samples, runs)) is not None:
        kind, text = (
            "added",
            f"{seen}: {added:.6g} is added once per micro-batch (a regulariser, a penalty on the "
            "weights), so that its share grows with their number. Multiply it by the "
            "micro-batch's units",
        )
    else:
        return samples_compared(samples, runs)
    return AuditFinding(_LOSS, samples.name, kind, text)


def samples_compared(samples: FirstSamples, runs: Sequence[SampleRun]) -> AuditFinding:
    """Return the finding that the loss compares its samples."""
    whole, first, second = runs
    mean = whole.total / (whole.units or math.nan)
    apart = (first.total + second.total) / (first.units + second.units or math.nan)
    gap = abs(mean - apart) / max(abs(mean), abs(apart), 1e-300)
    text = (
        f"the loss of some samples is {mean:.6g}, of the same in two parts {apart:.6g} (relative "
        f"difference {gap:.0e}). {_COUPLES}. {_GROUPS}"
    )
    if all(run.units for run in runs):
        parts = [half.total / half.units for half in (first, second)]
        if min(parts) < mean < max(parts):
            text += (
                ". If the loss is a mean, its units may be others than what it is the mean over "
                "(padding that is counted): count those"
            )
    return AuditFinding(_LOSS, samples.name, "loss", text)


def _is_mean(samples: FirstSamples, runs: Sequence[SampleRun]) -> bool:
    """True if the total is the mean of the parts' totals, by units or by samples."""
    whole, first, second = runs
    size = max(abs(run.total) for run in runs)
    half = samples.cut
    for a, b in ((first.units, second.units), (float(half), float(samples.count - half))):
        mean = (first.total * a + second.total * b) / (a + b) if a + b else math.nan
        if math.isfinite(mean) and samples.tolerance.near(whole.total, mean, size, 0.0):
            return True
    return False


def _is_sum_times_units(samples: FirstSamples, runs: Sequence[SampleRun]) -> bool:
    """True if what adds up is total / units; a half without a loss tells nothing."""
    if not all(run.units and run.total for run in runs):
        return False
    whole, first, second = (run.total / run.units for run in runs)
    size = max(abs(first) + abs(second), abs(whole))
    return samples.tolerance.near(whole, first + second, size, 0.0)


def _added_once(samples: FirstSamples, runs: Sequence[SampleRun]) -> float | None:
    """Return the amount that every cut adds once more; None if it is not always the same."""
    whole, first, second = runs
    half = samples.cut
    if half < 2:
        return None
    try:
        quarters = [samples.part(0, half // 2), samples.part(half // 2, half)]
    except (torch.OutOfMemoryError, Uncheckable, RuntimeError, ValueError):
        return None
    once = first.total + second.total - whole.total
    again = math.fsum(quarter.total for quarter in quarters) - first.total
    size = max(abs(run.total) for run in runs) + abs(once)
    relative, absolute = samples.tolerance.relative, samples.tolerance.absolute
    same = abs(once - again) <= 10 * relative * abs(once) + absolute
    return once if same and abs(once) > relative * size else None


def gradient_cause(samples: FirstSamples, runs: Sequence[SampleRun]) -> AuditFinding:
    """Return why the gradients do not add up although the totals do."""
    gap = samples.tolerance.gradient_gap(runs[0], runs[1:])
    assert gap is not None
    half = samples.cut
    large, small = (samples.part(0, half, backward=True, scale=s) for s in (SCALE, 1 / SCALE))
    why = (
        "The loss compares its samples by a statistic of them that is detached "
        "(losses / losses.detach().mean(): give wb.Coupled(encode, loss)); or a hook on a tensor "
        "or module, or the backward of an autograd.Function, mixes the samples or counts them; or "
        "a mean was multiplied by other units than it is a mean over"
    )
    if samples.tolerance.gradient_gap(large, [small]) is not None:
        why = (
            f"A backward from {SCALE:g} does not give {SCALE:g} times as much: a hook on a tensor "
            "or module, or the backward of an autograd.Function, is not linear (it clips, "
            "normalises, or adds)"
        )
    text = (
        f"the loss of {samples.count} samples is that of their parts, its gradient is not: at "
        f"parameter {samples.parameters[gap[0]][0]} it differs by {gap[1]:.0e} of its norm. {why}. "
        "Do that once per update, on the whole gradient: a hook on the parameter "
        "(parameter.register_hook) runs so"
    )
    return AuditFinding(_LOSS, samples.name, "gradient", text)


# --------------------------------------------------------------------- layers

_Traced = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]
"""Digests of inputs and outputs, by the name of a module and the index of its call."""


def layers_that_couple(
    samples: FirstSamples, count: int, known: Collection[str] = ()
) -> tuple[AuditFinding, ...]:
    """Return the modules whose output for one sample moves when another sample changes.

    A module is named if what it was given for the unchanged samples stayed the same and what it
    gave back for them did not: the origin, not all that lies behind it. Of nested modules, the
    innermost; the function itself, if it is in no module. Those that are `known` are left out. The
    first `count` samples run three times, without a backward.
    """
    found = [name for name in _origins(samples, count) if name not in known] if count > 1 else []
    if found and count > 2:
        # A dimension that happens to be as long as the samples are many is told by another
        # number of them.
        fewer = _origins(samples, count - 1)
        found = [name for name in found if name in fewer]
    types = {name: type(module).__name__ for name, module in samples.model.named_modules()}
    return tuple(
        AuditFinding(name, types.get(name, samples.name), "probe", _LAYER) for name in found
    )


def _origins(samples: FirstSamples, count: int) -> list[str]:
    def traced(*, graph: bool, change: bool = False) -> _Traced:
        samples.restore()
        with torch.set_grad_enabled(graph):
            return _trace(samples, count, change=change)

    graph = False
    try:
        before = traced(graph=graph)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a function that takes gradients itself (a gradient penalty)
        graph = True
        before = traced(graph=graph)
    again, after = traced(graph=graph), traced(graph=graph, change=True)
    origins: list[str] = []
    for key, (inputs, outputs) in before.items():
        if key not in after or key not in again:
            continue  # the path through the model depends on the sample itself
        noise = _distance(outputs, again[key][1])
        given, got = _distance(inputs, after[key][0]), _distance(outputs, after[key][1])
        moved = given <= _MOVED and got > _MOVED + 10 * noise
        name = key[0]
        below = f"{name}." if name and name != _FUNCTION else ""
        if moved and not any(one == name or one.startswith(below) for one in origins):
            origins.append(name)
    return origins


def _trace(samples: FirstSamples, count: int, *, change: bool) -> _Traced:
    """Run the first samples; return for every call of a module the digests of all samples but one.

    With `change`, the first sample is another one.
    """
    values = []
    for leaf in samples.layout.leaves:
        value = take(leaf.value, slice(0, count)) if leaf.batched else leaf.value
        values.append(_replace_first(value) if leaf.batched and change else value)
    batch = samples.layout.structure.build(values)
    traced: _Traced = {}
    calls: dict[str, int] = {}
    entered: list[list[Tensor]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(_other_rows((args, kwargs), count))

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            index = calls[name] = calls.get(name, -1) + 1
            traced[name, index] = (entered.pop(), _other_rows(output, count))

        return hook

    with ExitStack() as hooks:
        for name, module in samples.model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(leave(name), with_kwargs=True))
        torch.manual_seed(0)
        with suppress(LossError):  # a loss function's result cannot lead back from here
            traced[_FUNCTION, 0] = ([], _other_rows(samples.run(batch), count))
    return traced


def _replace_first(value: Any) -> Any:
    """Return the samples with another in place of the first: valid values, whatever they mean."""
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


def _other_rows(tree: Any, count: int) -> list[Tensor]:
    """Return the digests of all tensors with a row for each sample, without the first row."""
    leaves = [leaf.value for leaf in flatten(tree)[0]]
    return [
        _digest(leaf.detach()[1:])
        for leaf in leaves
        if isinstance(leaf, Tensor)
        and leaf.dim()
        and leaf.shape[0] == count
        and leaf.layout is torch.strided
    ]


def _digest(rows: Tensor) -> Tensor:
    """Return the norm of each row, and its product with a fixed vector of signs.

    Two numbers for each sample take no memory; all activations would.
    """
    if not rows.numel():
        return rows.new_zeros(2, dtype=torch.float64)
    if rows.is_complex():
        rows = torch.view_as_real(rows)
    if not rows.is_floating_point():
        rows = rows.float()
    flat = rows[:, None, None] if rows.dim() == 1 else rows.reshape(len(rows), -1, rows.shape[-1])
    size = torch.linalg.vector_norm(flat, dim=(1, 2), dtype=torch.float64)
    width = flat.shape[-1]
    drawn = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(width))
    mixed = (flat @ (drawn * 2 - 1).to(flat)).double()
    places = torch.arange(1, flat.shape[1] + 1, device=flat.device).double()
    return torch.cat([size, (mixed * places.sqrt()).sum(1)])


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the largest difference relative to the largest value; inf where shapes differ."""
    if [x.shape for x in a] != [x.shape for x in b]:
        return math.inf
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        gap = (left - right).abs().max()
        worst = max(worst, float(gap / left.abs().max().clamp_min(1e-30)))
    return worst
