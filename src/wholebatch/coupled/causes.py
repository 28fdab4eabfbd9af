"""Name the reason why the loss of some samples is not that of their parts, and what to do.

A few runs show if a mean was given as a sum, if units do not add up, and if a hook changes the
gradient. A layer in which samples act on each other is found by changing one sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wholebatch.coupled.sample_runs import SCALE, ChosenSamples, SampleRun, Uncheckable

_UNITS = (
    "return wb.cross_entropy(logits, labels), or count what the loss is a mean over: "
    "wb.mean_loss(mean, units=(labels != -100).sum())"
)
_COUPLES = (
    "If the loss or the model compares samples, or something depends on the batch (a capacity, a "
    "branch), move that part into wb.Coupled(encode, loss), which sees the whole batch"
)
_GROUPS = (
    "If every k neighbouring samples belong together (pairs, groups), make the micro-batch a "
    "multiple of k samples (in a trainer: at least 2 * k)"
)
_STATIC = (
    "If the batch has a leaf that is not a value per sample, name it: "
    "micro_batch=wb.samples(8, static=...)"
)
_LOSS = "the loss function"


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One layer, attribute or function: its name, its class, how it was found and what to do."""

    name: str
    type: str
    kind: str
    advice: str

    def __str__(self) -> str:
        kind = "" if self.type == self.name else f" ({self.type})"
        return f"{self.name or 'the model itself'}{kind}: {self.advice}"


# --------------------------------------------------------------------- the loss


def outside_norm(name: str, kind: str, where: str = _LOSS) -> AuditFinding:
    """Return the finding of a BatchNorm in a module that the loss function runs by itself."""
    text = (
        f"runs a {kind} in training mode that is not part of the model, so wholebatch cannot make "
        "it exact: pass every module that the loss runs (model=[net, other]; the loss function "
        "then gets the list), or put that module into evaluation mode (teacher.eval())"
    )
    return AuditFinding(where, name, "loss", text)


def not_tested(samples: ChosenSamples, why: str, *, is_finite: bool) -> AuditFinding:
    """Return the finding of a loss that has no value for parts of the samples."""
    text = (
        f"it has a value for {samples.count} samples, but {why}, so wholebatch cannot test if "
        "micro-batches add up to the batch"
    )
    coupled = (
        "A loss that needs several samples at once compares them: give wb.Coupled(encode, loss)"
    )
    cures = [coupled, _GROUPS, _STATIC]
    if not is_finite:
        cures.insert(0, f"If all labels of that part are ignored, its mean is 0 / 0: {_UNITS}")
    kind = "unrunnable" if is_finite else "untested"
    return AuditFinding(_LOSS, samples.name, kind, _listed(text, cures))


def _listed(text: str, cures: Sequence[str]) -> str:
    """Return a sentence, and what may be done about it, one cure on a line."""
    return "\n    - ".join([f"{text}:", *cures])


def loss_cause(
    samples: ChosenSamples, runs: Sequence[SampleRun], *, may_run: bool = True
) -> AuditFinding:
    """Return why the totals of the whole and its parts do not add up, as far as numbers tell.

    `may_run`: the samples may run once more, to tell what is added once per micro-batch.
    """
    whole, first, second = runs
    tolerance = samples.tolerance
    if not all(run.is_finite for run in runs) or tolerance.adds_up(whole, [first, second]):
        return samples_compared(samples, runs)
    losses = (
        f"the loss of {samples.count} samples is {whole.total:.6g}, that of their parts "
        f"{first.total:.6g} and {second.total:.6g}"
    )
    is_constant = whole.units == first.units == second.units
    if is_constant and _holds(samples, whole.units):
        kind, text = (
            "held",
            f"the units of {samples.count} samples are {whole.units:.6g}, and so are those of each "
            "of their parts: a number that the batch holds as a whole. Count them from the samples "
            "of the micro-batch",
        )
    elif is_constant and _is_mean(samples, runs):
        kind, text = (
            "mean",
            f"the units of {samples.count} samples are {whole.units:.6g}, and so are those of each "
            "of their parts: the units do not follow the micro-batch. Count them in it, such as "
            "wb.mean_loss(mean, units=len(labels)), or in a trainer's units=lambda batch: "
            f"len(batch['labels']); {losses}: a mean where a sum is expected",
        )
    elif _is_mean(samples, runs):
        kind, text = (
            "mean",
            f"{losses}: a mean where a sum is expected. Give wb.mean_loss(mean, units), or compute "
            'it with reduction="sum" and give wb.Loss(total, units)',
        )
    elif not tolerance.units_add_up(whole, [first, second]):
        kind, text = (
            "units",
            f"the units of {samples.count} samples are {whole.units:.6g}, those of their parts "
            f"{first.units:.6g} and {second.units:.6g}: units must add up. Count what the total is "
            "a sum over in the micro-batch itself (samples, or labels that are not ignored)",
        )
    elif _is_sum_times_units(samples, runs) and (not may_run or _is_so_again(samples, first)):
        kind, text = (
            "sum",
            f"{losses}: a sum given as a mean, so it is multiplied by the units a second time. "
            "Give wb.Loss(total, units) instead of wb.mean_loss",
        )
    elif may_run and (added := _added_once(samples, runs)) is not None:
        kind, text = (
            "added",
            f"{losses}: {added:.6g} is added once per micro-batch (a regulariser, a penalty on the "
            "weights), so its share grows with the number of micro-batches. Multiply it by the "
            "micro-batch's units",
        )
    else:
        return samples_compared(samples, runs)
    return AuditFinding(_LOSS, samples.name, kind, text)


def _holds(samples: ChosenSamples, units: float) -> bool:
    """True if this number is in the batch, beside its samples: somebody counted them before.

    So may the rows of a tensor that was not cut: the labels of graphs, beside rows that are nodes.
    """
    held = [leaf.value for leaf in samples.layout.leaves if not leaf.batched]
    tensors = [value for value in held if isinstance(value, Tensor)]
    numbers = [float(value) for value in tensors if value.numel() == 1]
    numbers += [float(value) for value in held if isinstance(value, (int, float))]
    rows = [len(value) for value in tensors if value.dim()]
    return units in numbers or any(1 < units <= number for number in rows)


def samples_compared(samples: ChosenSamples, runs: Sequence[SampleRun]) -> AuditFinding:
    """Return the finding that the loss compares its samples."""
    whole, first, second = runs
    mean = whole.total / (whole.units or math.nan)
    apart = (first.total + second.total) / (first.units + second.units or math.nan)
    gap = abs(mean - apart) / max(abs(mean), abs(apart), 1e-300)
    losses = (
        f"the loss of some samples is {mean:.6g}, of the same in two parts {apart:.6g} (relative "
        f"difference {gap:.0e})"
    )
    is_mean = (
        f"If the loss is a mean, the units may count something else: they are {whole.units:.6g} "
        f"for {samples.count} samples; {_UNITS}"
    )
    terms = (
        "If it adds several means over different counts, return wb.Loss.terms({name: (total, "
        "units), ...})"
    )
    parts = [half.total / (half.units or math.nan) for half in (first, second)]
    cures = [_COUPLES, is_mean, terms, _GROUPS]
    if min(parts) < mean < max(parts):  # as for a mean with other weights
        cures = [is_mean, terms, _COUPLES, _GROUPS]
    return AuditFinding(_LOSS, samples.name, "loss", _listed(losses, cures))


def _is_mean(samples: ChosenSamples, runs: Sequence[SampleRun]) -> bool:
    """True if the total is the mean of the parts' totals, by units or by samples."""
    whole, first, second = runs
    size = max(abs(run.total) for run in runs)
    half = samples.cut
    for a, b in ((first.units, second.units), (float(half), float(samples.count - half))):
        mean = (first.total * a + second.total * b) / (a + b) if a + b else math.nan
        if math.isfinite(mean) and samples.tolerance.near(whole.total, mean, size, 0.0):
            return True
    return False


def _is_sum_times_units(samples: ChosenSamples, runs: Sequence[SampleRun]) -> bool:
    """True if what adds up is total / units; a half without a loss tells nothing."""
    if not all(run.units and run.total for run in runs):
        return False
    whole, first, second = (run.total / run.units for run in runs)
    size = max(abs(first) + abs(second), abs(whole))
    return samples.tolerance.near(whole, first + second, size, 0.0)


def _quarters(samples: ChosenSamples) -> list[SampleRun]:
    """Run two parts of the first part; none where it has one sample, or where they cannot run."""
    half = samples.cut
    if half < 2:
        return []
    try:
        return [samples.part(0, half // 2), samples.part(half // 2, half)]
    except (torch.OutOfMemoryError, Uncheckable, RuntimeError, ValueError):
        return []


def _is_so_again(samples: ChosenSamples, first: SampleRun) -> bool:
    """True if the first part, too, is a sum times its units: one cut may be so by chance."""
    quarters = _quarters(samples)
    return not quarters or _is_sum_times_units(samples, [first, *quarters])


def _added_once(samples: ChosenSamples, runs: Sequence[SampleRun]) -> float | None:
    """Return the amount that every cut adds once more; None if it is not always the same."""
    whole, first, second = runs
    quarters = _quarters(samples)
    if not quarters:
        return None
    once = first.total + second.total - whole.total
    again = math.fsum(quarter.total for quarter in quarters) - first.total
    size = max(abs(run.total) for run in runs) + abs(once)
    relative, absolute = samples.tolerance.relative, samples.tolerance.absolute
    same = abs(once - again) <= 10 * relative * abs(once) + absolute
    return once if same and abs(once) > relative * size else None


def gradient_cause(samples: ChosenSamples, runs: Sequence[SampleRun]) -> AuditFinding:
    """Return why the gradients do not add up although the totals do."""
    gap = samples.tolerance.gradient_gap(runs[0], runs[1:])
    assert gap is not None
    half = samples.cut
    large, small = (samples.part(0, half, backward=True, scale=s) for s in (SCALE, 1 / SCALE))
    why = (
        "The loss divides by a detached statistic of its samples (losses / "
        "losses.detach().mean(): use wb.Coupled(encode, loss)); or a hook on a tensor or module, "
        "or the backward of an autograd.Function, mixes or counts the samples; or a mean was "
        "multiplied by the wrong units"
    )
    if samples.tolerance.gradient_gap(large, [small]) is not None:
        why = (
            f"A loss that is {SCALE:g} times as large does not give a gradient that is {SCALE:g} "
            "times as large: a hook on a tensor or module, or the backward of an "
            "autograd.Function, is not linear (it clips, normalises, or adds)"
        )
    text = (
        f"the loss of {samples.count} samples is that of their parts, its gradient is not: at "
        f"parameter {samples.parameters[gap[0]][0]} it differs by {gap[1]:.0e} of its norm. {why}. "
        "Do this once per update, on the whole gradient, with a hook on the parameter "
        "(parameter.register_hook)"
    )
    return AuditFinding(_LOSS, samples.name, "gradient", text)
