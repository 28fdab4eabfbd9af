"""The one test of a loss: total, units, gradient and buffers of samples, together and in two parts.

Accumulation is exact if they add up. So it is tested on the user's own data and with the user's own
loss function. There are four runs, whatever they find, so that ranks whose forwards meet stay in
step:

    whole    all samples, from the state that was found
    first    the first part, from the same state
    second   the second part, from the state that `first` has left
    again    the second part, from the state that was found

What the numbers tell is named: a mean given as a sum, other units, state that moved. For the rest
the message names `wholebatch verify`, which finds the layer and the cause.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from wholebatch.audit.finding import AuditFinding
from wholebatch.audit.gradient_digests import gap_of
from wholebatch.audit.layers import layers_by_type
from wholebatch.audit.samples_run import (
    SCALE,
    ChosenSamples,
    SampledTerm,
    SampleRun,
    spread_rows,
)
from wholebatch.batch.samples import Layout
from wholebatch.coupled.normalisation_layers import NORMS, evaluation_mode, is_spectral_norm
from wholebatch.window.forward_state import Key, is_same

_log = logging.getLogger("wholebatch")

SAMPLES = 8
"""How many samples the first test takes."""
_LOSS = "the loss function"
_UNITS = (
    "return wb.cross_entropy(logits, labels), or count what the loss is a mean over: "
    "wb.mean_loss(mean, units=(labels != -100).sum())"
)
_COUPLED = "a loss that compares samples: give wb.Coupled(encode, loss), which sees the whole batch"
_VERIFY = (
    "`wholebatch verify SCRIPT`, or print(wb.verify(model, loss, batch)), names the layer and the "
    "cause"
)
_STATE = (
    "Change it once per update, outside of the forward pass, reset it in each forward, or freeze it"
)


@dataclass(frozen=True, slots=True)
class AdditivityResult:
    """The findings of the test; not `conclusive` without two samples, units or a loss."""

    findings: tuple[AuditFinding, ...] = ()
    conclusive: bool = True


def check_adds_up(
    model: nn.Module,
    run: Callable[[Any], Any],
    layout: Layout | None,
    *,
    count: int = SAMPLES,
    gradients: bool = True,
    outputs: bool = False,
    name: str = "the loss function",
) -> AdditivityResult:
    """Compare samples of `layout` with their two parts; leave `model` as it was.

    `run(few)` runs forward and loss function as training does, precision included, on a batch of
    the same structure. It returns a loss; with `outputs`, tensors with a row for each sample.
    `count` samples are run, spread over `layout`; without `gradients` under `torch.no_grad()`.
    Findings call the function by its `name`.
    """
    if layout is None or layout.size < 2:
        return AdditivityResult(conclusive=False)
    rows = spread_rows(layout.size, max(2, min(layout.size, count)))
    samples = ChosenSamples(model, run, layout, rows, graph=gradients, outputs=outputs)
    try:
        with samples.testing():
            # Dropout draws nothing in evaluation mode: of its layers, then of the whole model.
            dropouts = [m for m in model.modules() if isinstance(m, _DropoutNd)]
            for models in ((), dropouts, (model,)):
                with evaluation_mode(*models):
                    whole = samples.whole()
                    if not samples.draws(whole):
                        return _compared(samples, name, whole)
    finally:
        free_memory_of_test()
    _log.warning(
        "the loss was not tested to add up over micro-batches: %s draws random numbers. Draw them "
        "with the batch, one for each sample",
        name,
    )
    return AdditivityResult()


def free_memory_of_test() -> None:
    """Return the memory of a test to the driver: its gaps would stay among training's tensors."""
    torch.clear_autocast_cache()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _compared(samples: ChosenSamples, name: str, whole: SampleRun) -> AdditivityResult:
    """Make the other three runs, and compare them."""
    rows, cut = samples.rows, samples.cut
    try:
        first = samples.part(rows[:cut], scale=1 / SCALE)
        second = samples.part(rows[cut:], again=False, scale=SCALE)
        again = samples.part(rows[cut:])
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        return AdditivityResult((unrunnable(samples.layout, len(rows), name, problem),))
    if samples.reads_outputs:
        # Another output may have had as many rows as one run has samples.
        common = set.intersection(*(set(run.terms) for run in (whole, first, second, again)))
        whole, first, second, again = (
            replace(run, terms={name: run.terms[name] for name in common})
            for run in (whole, first, second, again)
        )
    if not whole.terms or not whole.units or not math.isfinite(whole.total):
        return AdditivityResult(conclusive=False)
    written = samples.written_parameter()
    if written is not None:
        text = f"a forward changes this parameter, so it moves once per micro-batch. {_STATE}"
        return AdditivityResult((AuditFinding(written, "Parameter", "state", text),))
    if not _is_same_loss(samples, second, again):
        why = (
            f"and the loss depends on it: {again.total:.6g} before and {second.total:.6g} after "
            "(unless a list, an object or a variable outside of the model moves, too)"
        )
        moved = _moved(samples, samples.start.values(), first.after.values())
        return AdditivityResult(_state(samples, first, moved, why) or (_outside(second, again),))
    if not (math.isfinite(first.total) and math.isfinite(again.total)):
        return AdditivityResult((_untested(len(rows), name),))
    if not _adds_up(samples, whole, (first, again)):
        return AdditivityResult((_cause(samples, name, whole, first, again),))
    gap = _gradient_gap(samples, whole, (first, second))
    if gap is not None:
        text = (
            f"the loss of {len(rows)} samples is that of their parts, its gradient is not: at "
            f"parameter {gap[0]} it differs by {gap[1]:.0e} of its norm. A detached statistic of "
            "the samples (use wb.Coupled(encode, loss)), a hook on a tensor or module, or the "
            f"backward of an autograd.Function depends on the batch; {_VERIFY}"
        )
        return AdditivityResult((AuditFinding(_LOSS, name, "gradient", text),))
    findings = _state_after(samples, whole, first, second, again)
    # A mean of one unit is its sum: a part without units tells nothing of ignored labels.
    # So does a loss of exactly 0: a triplet loss without a triplet.
    tells = bool(whole.total) and bool(first.units) and bool(again.units)
    return AdditivityResult(findings, samples.reads_outputs or tells)


# --------------------------------------------------------------------- comparisons


def _is_same_loss(samples: ChosenSamples, second: SampleRun, again: SampleRun) -> bool:
    """True if two runs of the same samples gave the same loss."""
    finer, absolute = samples.rounding.finer, samples.rounding.absolute / 1e3
    return all(
        not math.isfinite(a.total)
        or (
            math.isclose(a.total, b.total, rel_tol=finer, abs_tol=absolute * a.units)
            and math.isclose(a.units, b.units, rel_tol=1e-6)
        )
        for a, [b] in _by_term(second, [again])
    )


def _units_add_up(samples: ChosenSamples, whole: SampleRun, parts: Sequence[SampleRun]) -> bool:
    allowed = max(1e-5, samples.rounding.relative / 5)
    return all(
        math.isclose(term.units, math.fsum(part.units for part in of_parts), rel_tol=allowed)
        for term, of_parts in _by_term(whole, parts)
    )


def _adds_up(samples: ChosenSamples, whole: SampleRun, parts: Sequence[SampleRun]) -> bool:
    """True if every term's total and units are the sums of those of the parts."""
    return _units_add_up(samples, whole, parts) and all(
        samples.rounding.near(term.total, [p.total for p in of_parts], max(1.0, term.units))
        for term, of_parts in _by_term(whole, parts)
    )


def _by_term(
    whole: SampleRun, parts: Sequence[SampleRun]
) -> Iterator[tuple[SampledTerm, list[SampledTerm]]]:
    """Yield each term of the whole beside those of the parts; a missing one is 0."""
    for name in {name: None for run in (whole, *parts) for name in run.terms}:
        whole_term, *terms = [run.terms.get(name, SampledTerm()) for run in (whole, *parts)]
        yield whole_term, terms


def _gradient_gap(
    samples: ChosenSamples, whole: SampleRun, parts: Sequence[SampleRun]
) -> tuple[str, float] | None:
    """Return the parameter whose gradient adds up worst, and by how much; None if all do."""
    digests = [run.digests for run in parts if run.digests is not None]
    if whole.digests is None or len(digests) < len(parts):
        return None
    gap = gap_of(whole.digests, digests, samples.rounding.gradient)
    return None if gap is None else (samples.parameters[gap[0]][0], gap[1])


# --------------------------------------------------------------------- what the numbers tell


def _cause(
    samples: ChosenSamples, name: str, whole: SampleRun, first: SampleRun, second: SampleRun
) -> AuditFinding:
    """Return why the totals of the whole and its parts do not add up, as far as numbers tell."""
    count, near = len(samples.rows), samples.rounding.near
    runs = (whole, first, second)
    losses = (
        f"the loss of {count} samples is {whole.total:.6g}, that of their parts "
        f"{first.total:.6g} and {second.total:.6g}"
    )
    units = (
        f"the units of {count} samples are {whole.units:.6g}, those of their parts "
        f"{first.units:.6g} and {second.units:.6g}"
    )
    units_add_up = _units_add_up(samples, whole, (first, second))
    by_rows = samples.cut / count, 1 - samples.cut / count
    of_both = first.units + second.units
    by_units = (first.units / of_both, second.units / of_both) if of_both else by_rows
    if any(
        near(whole.total, [first.total * a, second.total * b], 0.0) for a, b in (by_units, by_rows)
    ):
        kind = "mean" if units_add_up else "units"
        follow = ""
        if whole.units == first.units == second.units:
            follow = f"{units}: they do not follow the micro-batch; "
        text = (
            f"{follow}{losses}: a mean where a sum is expected. Give wb.mean_loss(mean, units) "
            "with the units of the micro-batch, such as len(labels), or the sum as "
            "wb.Loss(total, units)"
        )
    elif not units_add_up:
        kind = "units"
        text = (
            f"{units}: units must add up. Count what the total is a sum over in the micro-batch "
            "itself (samples, or labels that are not ignored)"
        )
    elif all(run.units and run.total for run in runs) and near(
        whole.total / whole.units, [run.total / run.units for run in (first, second)], 0.0
    ):
        kind = "sum"
        text = (
            f"{losses}: a sum given as a mean, so it is multiplied by the units a second time. "
            "Give wb.Loss(total, units) instead of wb.mean_loss"
        )
    else:
        kind = "loss"
        means = [run.total / run.units if run.units else math.nan for run in runs]
        text = (
            f"{losses}, so micro-batches do not add up to the batch. Their means are "
            f"{means[0]:.6g}, and {means[1]:.6g} and {means[2]:.6g}. Either it compares samples "
            "(use wb.Coupled(encode, loss)); or a layer mixes them; or the units, "
            f"{whole.units:.6g}, may count something else than the mean is over ({_UNITS}; for "
            "means over different counts wb.Loss.terms({...})); or "
            f"{first.total + second.total - whole.total:.6g} is added once per micro-batch "
            f"(multiply it by the units). {_known_to_mix(samples.model)}{_VERIFY}"
        )
    return AuditFinding(_LOSS, name, kind, text)


def _known_to_mix(model: nn.Module) -> str:
    """Return what a look at the modules says of a loss that does not add up."""
    by_time = [n for n, m in model.named_modules() if getattr(m, "batch_first", True) is False]
    custom = [f"{each}. " for each in layers_by_type(model) if each.kind == "custom"]
    if by_time:
        custom.append(f"{by_time[0] or 'The model'} has batch_first=False: its rows are times. ")
    return "".join(custom)


def _untested(count: int, name: str) -> AuditFinding:
    text = (
        f"it has a value for {count} samples, but is not finite for a part of them, so wholebatch "
        f"cannot test if micro-batches add up to the batch. If all labels of that part are "
        f"ignored, its mean is 0 / 0: {_UNITS}. Or it is {_COUPLED}"
    )
    return AuditFinding(_LOSS, name, "untested", text)


def unrunnable(layout: Layout, count: int, name: str, problem: Exception) -> AuditFinding:
    """Return the finding of a loss that runs on some samples, and not on a part of them."""
    # A tensor that was split and has one dimension may be class weights.
    weights = [
        leaf.name
        for leaf in layout.leaves
        if leaf.batched and isinstance(leaf.value, Tensor) and leaf.name
        if leaf.value.dim() == 1 and leaf.value.is_floating_point()
    ]
    such_as, leaf = (f" (such as {weights[0]!r})", repr(weights[0])) if weights else ("", "...")
    text = (
        f"it runs on {count} samples, but not on a part of them ({problem!r}), so wholebatch "
        "cannot test if micro-batches add up to the batch. If the batch has a leaf that is not a "
        f"value per sample{such_as}, name it: micro_batch=wb.samples(8, static={leaf}). Or it is "
        f"{_COUPLED}"
    )
    return AuditFinding(_LOSS, name, "unrunnable", text)


# --------------------------------------------------------------------- state that a forward changes


def _moved(samples: ChosenSamples, before: dict[Key, Any], after: dict[Key, Any]) -> list[Key]:
    """Return the buffers and attributes that differ, but for layers that are judged by type."""
    return [
        key
        for key in {**before, **after}
        if not is_same(before.get(key), after.get(key))
        and not (isinstance(key[0], NORMS) or is_spectral_norm(key[0]))
    ]


def _state(
    samples: ChosenSamples, first: SampleRun, keys: Sequence[Key], why: str
) -> tuple[AuditFinding, ...]:
    """Return a finding for each of the first few items of state that moved."""
    before, after = samples.start.values(), first.after.values()
    names = {module: name for name, module in samples.model.named_modules()}
    return tuple(
        AuditFinding(
            ".".join(filter(None, (names.get(module), attribute))),
            type(module).__name__,
            "state",
            "moves once per micro-batch, not once per update "
            f"({_shown(before.get((module, attribute)))} → "
            f"{_shown(after.get((module, attribute)))} in one forward), {why}. {_STATE}",
        )
        for module, attribute in keys[:4]
    )


def _state_after(
    samples: ChosenSamples, whole: SampleRun, first: SampleRun, second: SampleRun, again: SampleRun
) -> tuple[AuditFinding, ...]:
    """Return buffers and tensors that two parts leave otherwise than the whole does.

    Harmless are counters, sums over samples, and what depends on the last input alone.
    """
    start, of_whole, of_first, of_parts, last = (
        state.values()
        for state in (samples.start, whole.after, first.after, second.after, again.after)
    )
    close = 1e-9 if samples.rounding.relative < 1e-3 else 1e-4
    moved = []
    for key in _moved(samples, start, of_whole):
        value, of_two = of_whole.get(key), of_parts.get(key)
        is_log = not isinstance(value, Tensor) and key[1] not in key[0]._buffers
        is_settled = is_same(value, of_two, close) or is_same(of_two, last.get(key), close)
        if not (
            is_log or is_settled or _is_counter(start.get(key), value, of_first.get(key), of_two)
        ):
            moved.append(key)
    return _state(samples, first, moved, "and two parts leave it at another value than the whole")


def _is_counter(*values: Any) -> bool:
    """True for a number that moves by the same amount in each forward."""
    if not all(_is_number(value) for value in values):
        return False
    start, whole, first, second = map(float, values)
    return whole != start and first == whole and second - first == whole - start


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


def _shown(value: Any) -> str:
    if _is_number(value):
        return f"{float(value):.6g}"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "nothing"


def _outside(run: SampleRun, again: SampleRun) -> AuditFinding:
    text = (
        f"the same samples give {run.total:.6g} and then {again.total:.6g}, with the same random "
        "numbers: state moves with every call that is no buffer of the model (a teacher that "
        "follows the model, a list, a Python variable). Change it once per update, outside of the "
        "loss function"
    )
    return AuditFinding("(state outside of the model)", "Python", "outside", text)
