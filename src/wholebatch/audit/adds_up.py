"""The one test of a loss: total, units, gradient and state of samples, together and in two parts.

Accumulation is exact if they add up. So it is tested on the user's own data and with the user's own
loss function. There are four runs, whatever they find, so that ranks whose forwards meet stay in
step:

    whole    all samples, from the state that was found
    first    the first part, from the same state
    second   the second part, from the state that `first` has left
    again    the second part, from the state that was found

What the numbers tell is named: a mean given as a sum, other units, state that moved. For the rest
the message names the layers that are known to mix samples, and `wb.verify`, which finds the cause.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.audit.finding import AuditFinding
from wholebatch.audit.layers import suspects
from wholebatch.audit.samples_run import SCALE, ChosenSamples, SampleRun, spread_rows
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
_COUPLES = (
    "If the loss or the model compares samples, or something depends on the batch (a capacity, a "
    "branch), move that part into wb.Coupled(encode, loss), which sees the whole batch"
)
_GROUPS = (
    "If every k neighbouring samples belong together (pairs, groups), make the micro-batch a "
    "multiple of k samples (in a trainer: at least 2 * k)"
)
_VERIFY = "print(wb.verify(model, loss, batch)) names the layer and the cause"
_STATIC = (
    "If the batch has a leaf that is not a value per sample{such_as}, name it: "
    "micro_batch=wb.samples(8, static={name})"
)
_STATE = (
    "Change it once per update, outside of the forward pass, reset it in each forward, or freeze "
    "it. If it is set only once, from the first batch, run that batch through the model before "
    "training"
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
    for graph in (True,) if gradients else (False, True):
        samples = ChosenSamples(model, run, layout, rows, graph=graph, outputs=outputs)
        try:
            with samples.testing():
                return _compared(samples, name)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # without a graph, a function that takes gradients itself cannot run
            if graph:
                raise
        finally:
            free_memory_of_test()
    raise AssertionError("unreachable")


def free_memory_of_test() -> None:
    """Return the memory of a test to the driver: its gaps would stay among training's tensors."""
    torch.clear_autocast_cache()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _compared(samples: ChosenSamples, name: str) -> AdditivityResult:
    """Make the four runs; compare state, sums, gradients and the state left behind."""
    rows, cut = samples.rows, samples.cut
    whole = samples.whole()
    try:
        first = samples.part(rows[:cut], scale=1 / SCALE)
        moved = _moved(samples, first)
        try:
            second = samples.part(rows[cut:], again=False, scale=SCALE)
        except RuntimeError as problem:
            if isinstance(problem, torch.OutOfMemoryError) or not moved:
                raise
            samples.part(rows[cut:])  # raises too, if the state is not the reason
            why = f"and the next micro-batch cannot run with it ({problem!r})"
            return AdditivityResult(_state(samples, first, moved, why))
        again = samples.part(rows[cut:])
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        if _run_now(samples):
            raise  # not because they are fewer
        found = unrunnable(samples.model, samples.layout, len(rows), name, problem)
        return AdditivityResult((found,))
    if samples.reads_outputs:
        # Another output may have had as many rows as one run has samples.
        common = set.intersection(*(set(run.terms) for run in (whole, first, second, again)))
        whole, first, second, again = (
            SampleRun({n: run.terms[n] for n in common}, run.digests, run.after)
            for run in (whole, first, second, again)
        )
    if not whole.terms or not whole.units or not whole.is_finite:
        return AdditivityResult(conclusive=False)
    written = samples.written_parameter()
    if written is not None:
        text = f"a forward changes this parameter, so it moves once per micro-batch. {_STATE}"
        return AdditivityResult((AuditFinding(written, "Parameter", "state", text),))
    if not samples.same_again(second, again):
        why = (
            f"and the loss depends on it: that of the same samples is {again.total:.6g} before and "
            f"{second.total:.6g} after (unless a list, an object or a variable outside of the "
            "model moves, too)"
        )
        return AdditivityResult(_state(samples, first, moved, why) or (_outside(second, again),))
    if not samples.draws.held or not whole.after.draws_same(first.after, host=True):
        return _without_random_numbers(samples, name)
    parts = (first, again)
    if not all(part.is_finite for part in parts):
        return AdditivityResult((_untested(samples, name),))
    if not samples.adds_up(whole, parts):
        return AdditivityResult((_cause(samples, name, whole, first, again),))
    gap = samples.gradient_gap(whole, (first, second))
    if gap is not None:
        return AdditivityResult((_gradient(samples, name, gap),))
    findings = _state_after(samples, whole, first, second, again)
    # A mean of one unit is its sum: a part without units tells nothing of ignored labels.
    # So does a loss of exactly 0: a triplet loss without a triplet.
    tells = bool(whole.total) and all(part.units for part in parts)
    return AdditivityResult(findings, samples.reads_outputs or tells)


def _run_now(samples: ChosenSamples) -> bool:
    """True if both parts run after all: an error came from elsewhere."""
    try:
        samples.part(samples.rows[: samples.cut])
        samples.part(samples.rows[samples.cut :])
    except Exception:
        return False
    return True


def adds_up_in_groups(
    model: nn.Module, run: Callable[[Any], Any], both: Layout, sizes: Sequence[int]
) -> bool:
    """True if neighbouring samples belong together (pairs), and micro-batches hold them whole.

    `both` has the samples of the first few micro-batches, of these sizes. Every cut between groups
    must add up, at least three of them, and one within a group must not: else nothing tells which
    belong together. They run without gradients.
    """
    rows = range(both.size)
    samples = ChosenSamples(model, run, both, rows, graph=False)

    def cut_adds_up(order: Sequence[int], cut: int) -> bool:
        return samples.adds_up(whole, [samples.part(order[:cut]), samples.part(order[cut:])])

    within = math.gcd(*sizes)
    with suppress(RuntimeError, ValueError), samples.testing():
        whole = samples.whole()
        for group in range(2, within + 1):
            cuts = range(group, both.size, group)[:4]
            if within % group or len(cuts) < 3:  # fewer may add up by chance
                continue
            if all(cut_adds_up(rows, cut) for cut in cuts):
                return samples.draws.held and not cut_adds_up([*rows[1:], 0], group)
    return False


def _without_random_numbers(samples: ChosenSamples, name: str) -> AdditivityResult:
    """Compare in evaluation mode, where dropout draws nothing: the draws cannot be held."""
    with suppress(Exception), evaluation_mode(samples.model):
        whole = samples.whole()
        parts = [
            samples.part(samples.rows[: samples.cut]),
            samples.part(samples.rows[samples.cut :]),
        ]
        if samples.draws.held and whole.after.draws_same(parts[0].after, host=True):
            if samples.adds_up(whole, parts):
                return AdditivityResult()
            return AdditivityResult((_cause(samples, name, whole, *parts),))
    _log.warning(
        "the loss was not tested to add up over micro-batches: the random numbers of %s cannot be "
        "given to parts of its samples (wb.verify compares whole updates)",
        name,
    )
    return AdditivityResult()


# --------------------------------------------------------------------- what the numbers tell


def _cause(
    samples: ChosenSamples, name: str, whole: SampleRun, first: SampleRun, second: SampleRun
) -> AuditFinding:
    """Return why the totals of the whole and its parts do not add up, as far as numbers tell."""
    count = len(samples.rows)
    losses = (
        f"the loss of {count} samples is {whole.total:.6g}, that of their parts "
        f"{first.total:.6g} and {second.total:.6g}"
    )
    units = (
        f"the units of {count} samples are {whole.units:.6g}, those of their parts "
        f"{first.units:.6g} and {second.units:.6g}"
    )
    units_add_up = samples.units_add_up(whole, (first, second))
    if _is_mean(samples, whole, first, second):
        kind = "mean" if units_add_up else "units"
        text = (
            f"{losses}: a mean where a sum is expected. Give wb.mean_loss(mean, units) with the "
            "units of the micro-batch, such as len(labels), or compute the loss with "
            'reduction="sum" and give wb.Loss(total, units)'
        )
        if whole.units == first.units == second.units:
            text = f"{units}: they do not follow the micro-batch; {text}"
    elif not units_add_up:
        kind = "units"
        text = (
            f"{units}: units must add up. Count what the total is a sum over in the micro-batch "
            "itself (samples, or labels that are not ignored)"
        )
    elif _is_sum_times_units(samples, whole, first, second):
        kind = "sum"
        text = (
            f"{losses}: a sum given as a mean, so it is multiplied by the units a second time. "
            "Give wb.Loss(total, units) instead of wb.mean_loss"
        )
    else:
        return _compares(samples, name, whole, first, second)
    return AuditFinding(_LOSS, name, kind, text)


def _is_mean(samples: ChosenSamples, whole: SampleRun, first: SampleRun, second: SampleRun) -> bool:
    """True if the total is the mean of the parts' totals, by units or by samples."""
    size = max(abs(run.total) for run in (whole, first, second))
    rows = float(samples.cut), float(len(samples.rows) - samples.cut)
    for a, b in ((first.units, second.units), rows):
        mean = (first.total * a + second.total * b) / (a + b) if a + b else math.nan
        if math.isfinite(mean) and samples.near(whole.total, mean, size, 0.0):
            return True
    return False


def _is_sum_times_units(samples: ChosenSamples, *runs: SampleRun) -> bool:
    """True if what adds up is total / units; a part without a loss tells nothing."""
    if not all(run.units and run.total for run in runs):
        return False
    whole, first, second = (run.total / run.units for run in runs)
    size = max(abs(first) + abs(second), abs(whole))
    return samples.near(whole, first + second, size, 0.0)


def _compares(
    samples: ChosenSamples, name: str, whole: SampleRun, first: SampleRun, second: SampleRun
) -> AuditFinding:
    """Return the finding of a loss that does not add up, for a reason that no number tells."""
    mean = whole.total / (whole.units or math.nan)
    apart = (first.total + second.total) / (first.units + second.units or math.nan)
    gap = abs(mean - apart) / max(abs(mean), abs(apart), 1e-300)
    text = (
        f"the loss of some samples is {mean:.6g}, of the same in two parts {apart:.6g} (relative "
        f"difference {gap:.0e}), so micro-batches do not add up to the batch"
    )
    is_mean = (
        f"If the loss is a mean, the units may count something else: they are {whole.units:.6g} "
        f"for {len(samples.rows)} samples; {_UNITS}"
    )
    terms = (
        "If it adds several means over different counts, return wb.Loss.terms({name: (total, "
        "units), ...}); if it is a quotient of two sums, wb.Coupled with both as encode"
    )
    added = (
        f"If {first.total + second.total - whole.total:.6g} is added once per micro-batch (a "
        "regulariser, a penalty on the weights), multiply it by the micro-batch's units"
    )
    cures = [_COUPLES, is_mean, terms, added, _GROUPS, _VERIFY]
    means = [part.total / (part.units or math.nan) for part in (first, second)]
    if min(means) < mean < max(means):  # as for a mean with other weights
        cures = [is_mean, terms, _COUPLES, added, _GROUPS, _VERIFY]
    cures[:0] = suspects(samples.model)
    return AuditFinding(_LOSS, name, "loss", _listed(text, cures))


def _gradient(samples: ChosenSamples, name: str, gap: tuple[str, float]) -> AuditFinding:
    text = (
        f"the loss of {len(samples.rows)} samples is that of their parts, its gradient is not: at "
        f"parameter {gap[0]} it differs by {gap[1]:.0e} of its norm"
    )
    cures = [
        "If the loss divides by a detached statistic of its samples (losses / "
        "losses.detach().mean()), use wb.Coupled(encode, loss)",
        "If a hook on a tensor or module, or the backward of an autograd.Function, clips, "
        "normalises or counts the samples, do it once per update, on the whole gradient, with a "
        "hook on the parameter (parameter.register_hook)",
        *suspects(samples.model),
        _VERIFY,
    ]
    return AuditFinding(_LOSS, name, "gradient", _listed(text, cures))


def _untested(samples: ChosenSamples, name: str) -> AuditFinding:
    text = (
        f"it has a value for {len(samples.rows)} samples, but is not finite for a part of them, so "
        "wholebatch cannot test if micro-batches add up to the batch"
    )
    ignored = f"If all labels of that part are ignored, its mean is 0 / 0: {_UNITS}"
    coupled = (
        "A loss that needs several samples at once compares them: give wb.Coupled(encode, loss)"
    )
    return AuditFinding(_LOSS, name, "untested", _listed(text, [ignored, coupled, _GROUPS]))


def unrunnable(
    model: nn.Module, layout: Layout, count: int, name: str, problem: Exception
) -> AuditFinding:
    """Return the finding of a loss that runs on some samples, and not on a part of them."""
    # A tensor that was split and has one dimension may be class weights.
    leaves = [
        leaf.name
        for leaf in layout.leaves
        if leaf.batched
        and isinstance(leaf.value, Tensor)
        and leaf.name
        and leaf.value.dim() == 1
        and leaf.value.is_floating_point()
    ]
    such_as = f" (such as {leaves[0]!r})" if leaves else " (class weights)"
    static = _STATIC.format(such_as=such_as, name=repr(leaves[0]) if leaves else "...")
    text = (
        f"it runs on {count} samples, but not on a part of them ({problem!r}), so wholebatch "
        "cannot test if micro-batches add up to the batch"
    )
    coupled = (
        "A loss that needs several samples at once compares them: give wb.Coupled(encode, loss)"
    )
    cures = [static, coupled, _GROUPS, *suspects(model)]
    return AuditFinding(_LOSS, name, "unrunnable", _listed(text, cures))


def _listed(text: str, cures: Sequence[str]) -> str:
    """Return a sentence, and what may be done about it, one cure on a line."""
    return "\n    - ".join([f"{text}:", *cures])


# --------------------------------------------------------------------- state that a forward changes


def _moved(samples: ChosenSamples, run: SampleRun) -> list[Key]:
    """Return the buffers and attributes that a run has changed."""
    before, after = samples.start.values(), run.after.values()
    return [
        key
        for key in {**before, **after}
        if not is_same(before.get(key), after.get(key)) and not _is_known(key)
    ]


def _is_known(key: Key) -> bool:
    """True for the state of layers that are judged by their type."""
    return isinstance(key[0], NORMS) or is_spectral_norm(key[0])


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
            f"moves once per micro-batch, not once per update ({_shown(before.get(key))} → "
            f"{_shown(after.get(key))} in one forward), {why}. {_STATE}",
        )
        for key in keys[:4]
        for module, attribute in [key]
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
    close = 1e-9 if samples.precision.narrowest is torch.float64 else 1e-4
    moved = []
    for key in _moved(samples, whole):
        values = [state.get(key) for state in (start, of_whole, of_first, of_parts)]
        is_log = not isinstance(values[1], Tensor) and key[1] not in key[0]._buffers
        is_settled = is_same(values[1], values[3], close) or is_same(
            values[3], last.get(key), close
        )
        if not (is_log or is_settled or _is_counter(*values)):
            moved.append(key)
    why = "and two parts leave it at another value than the whole"
    return _state(samples, first, moved, why)


def _is_counter(start: Any, whole: Any, first: Any, second: Any) -> bool:
    """True for a number that moves by the same amount in each forward."""
    values = (start, whole, first, second)
    if not all(isinstance(v, int | float) or _is_number(v) for v in values):
        return False
    a, b, c, d = map(float, values)
    return b != a and c == b and d - c == b - a


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _outside(run: SampleRun, again: SampleRun) -> AuditFinding:
    text = (
        f"the same samples give {run.total:.6g} and then {again.total:.6g}, with the same random "
        "numbers: state moves with every call that is no buffer of the model (a teacher that "
        "follows the model, a list or counter, a Python variable that the loss function sets). It "
        "would change once per micro-batch, not once per update: change it once per update, "
        "outside of the loss function"
    )
    return AuditFinding("(state outside of the model)", "Python", "outside", text)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() == 1:
        return f"{float(value):.6g}"
    if isinstance(value, Tensor):
        mean = float(value.double().mean()) if value.numel() else 0.0
        return f"a tensor of shape {tuple(value.shape)} with mean {mean:.6g}"
    return re.sub(r"\s+", " ", repr(value))[:40]
