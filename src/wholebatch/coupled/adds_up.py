"""Test that a loss adds up: total, units and gradient of samples equal those of their parts.

Accumulation is exact if this holds. So it is tested on the user's own data and with the user's own
loss function, before the first window and again in windows 2, 4, 8, ...:

```python
result = check_adds_up(model, lambda few: loss(model, few), layout_of(batch))
result.refuse()        # raises LossError or UnsupportedError with the causes and the ways out
```

The samples are cut unevenly, 3 : 5. There are four runs, whatever they find, so that ranks whose
forwards meet stay in step:

    whole           all samples, from the state that was found
    first           the first part, from the same state
    second          the second part, from the state that `first` has left
    second_again    the second part, from the state that was found
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.samples import Layout, readable_layout
from wholebatch.coupled.causes import (
    AuditFinding,
    gradient_cause,
    loss_cause,
    not_tested,
    outside_norm,
    samples_compared,
)
from wholebatch.coupled.coupling_layers import layers_by_type, layers_that_couple
from wholebatch.coupled.normalisation_layers import (
    BatchNorm,
    InstanceNorm,
    evaluation_mode,
    is_spectral_norm,
)
from wholebatch.coupled.sample_runs import (
    SCALE,
    ChosenSamples,
    SampleRun,
    Uncheckable,
)
from wholebatch.errors import LossError, UnsupportedError
from wholebatch.window.autocast import without_autocast
from wholebatch.window.forward_state import Key

_log = logging.getLogger("wholebatch")

SAMPLES = 8
"""How many samples the first test takes, with their gradient."""
UNTESTED = ("untested", "unrunnable")
"""The kinds of findings of a loss that has no value for a part of the samples, or cannot run."""
_MISTAKES = ("mean", "sum", "added", "units", "held", "divided", "compared")
_ADVICE = (
    "Change it once per update, outside of the forward pass, reset it in each forward, or freeze "
    "it. If it is set only once, from the first batch, run that batch through the model before "
    "training"
)


@dataclass(frozen=True, slots=True)
class AdditivityResult:
    """The findings of the test; not `conclusive` without two samples, units or a loss."""

    findings: tuple[AuditFinding, ...] = ()
    conclusive: bool = True

    def refuse(self, off: str = "audit=False", on_another_rank: bool = False) -> None:
        """Raise an error if a cause was found, here or on another rank.

        `off` is the option with which a user of this entry point trains all the same.
        """
        if not self.findings and not on_another_rank:
            return
        listed = "\n  ".join(map(str, self.findings)) or "(found on another rank)"
        message = (
            "micro-batches cannot give the update of the whole batch here:\n  "
            f"{listed.rstrip('.')}.\n{off} skips this test; the update may then differ from that "
            "of the whole batch"
        )
        mistaken = self.findings and all(f.kind in _MISTAKES for f in self.findings)
        raise LossError(message) if mistaken else UnsupportedError(message)


def check_adds_up(
    model: nn.Module,
    run: Callable[[Any], Any],
    layout: Layout | None,
    *,
    count: int = 0,
    gradients: bool = True,
    names_layers: bool = True,
    micro_sizes: Collection[int] = (),
    batch: Layout | None = None,
    **options: Any,
) -> AdditivityResult:
    """Compare the samples of `layout` with their two parts; leave `model` as it was.

    `run(few)` runs forward and loss function as training does, precision included, on a batch of
    the same structure. `options` are those of `ChosenSamples`.

    `count` samples are run, spread over `layout`. With `gradients`, their gradients are compared
    too (of up to 8, if no `count` is given). Without, they run under `torch.no_grad()`.
    `names_layers=False` makes no run beside the four: a forward that meets other ranks must run
    equally often on all of them. Neighbours that belong together (pairs) may be coupled if the
    micro-batches hold them whole: `micro_sizes` are the numbers of samples of all micro-batches of
    `batch` but the last.
    """
    if layout is None or layout.size < 2:
        return AdditivityResult(conclusive=False)
    count = min(layout.size, count or (SAMPLES if gradients else layout.size))

    def choose(layout: Layout, count: int, *, graph: bool) -> ChosenSamples:
        return ChosenSamples(model, run, layout, count, graph=graph, **options)

    problem: Exception | None = None
    try:
        # Without a graph, a function that takes gradients itself cannot run.
        for graph in (True,) if gradients else (False, True):
            samples = choose(layout, count, graph=graph)
            comparison = _Comparison(samples, names_layers)
            with samples.testing():
                try:
                    result, problem = comparison.result(), None
                    break
                except (torch.OutOfMemoryError, Uncheckable):
                    raise
                except Exception as error:
                    if names_layers and comparison.runs_now():
                        raise
                    result, problem = AdditivityResult(), error
        couples = any(finding.kind in ("loss", "probe", *UNTESTED) for finding in result.findings)
        if names_layers and (couples or problem is not None):
            groups = choose(layout if batch is None else batch, 0, graph=False)
            if _adds_up_in_groups(groups, math.gcd(*micro_sizes)):
                return AdditivityResult()
        if problem is not None:
            raise problem
        return result
    except Uncheckable as reason:
        _log.debug("the loss was not tested: %s", reason)
        return AdditivityResult()
    finally:
        free_memory_of_test()


def free_memory_of_test() -> None:
    """Return the memory of a test to the driver: its gaps would stay among training's tensors."""
    torch.clear_autocast_cache()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _adds_up_in_groups(samples: ChosenSamples, micro: int) -> bool:
    """True if neighbouring samples belong together (pairs), and whole groups of them add up.

    Micro-batches that hold groups whole are exact then: `micro` divides their numbers of samples.
    As many samples as two of them run, or all if it is 0. The order of the samples must matter:
    else nothing tells which belong together, and a cut between groups may add up by chance (the
    mean of the hardest half of the samples).
    """
    samples.count = min(2 * micro or samples.layout.size, samples.layout.size)
    samples.rows = list(range(samples.count))  # neighbours
    within = math.gcd(micro, samples.count)
    try:
        with samples.testing():
            whole = samples.whole()
            for size in range(2, samples.count // 2 + 1):
                cuts = range(size, samples.count, size)
                if within % size or not samples.draws.held or not whole.is_finite:
                    continue
                with suppress(RuntimeError, ValueError):  # A group has more samples.
                    ends = ((samples.part(0, c), samples.part(c, samples.count)) for c in cuts[:4])
                    if all(samples.tolerance.adds_up(whole, parts) for parts in ends):
                        rotated = samples.of_rows([*range(1, samples.count), 0])
                        return not samples.tolerance.adds_up(whole, [rotated])
    except (RuntimeError, ValueError) as problem:
        _log.debug("groups of samples could not be run: %r", problem)
    return False


def audit(model: nn.Module, batch: Any, run: Callable[[Any], Any]) -> list[AuditFinding]:
    """Return all that keeps micro-batches from the update of the whole batch, as far as it shows.

    These are layers that couple samples by their type, and what `check_adds_up` finds. `run(batch)`
    returns a loss.
    """
    findings = check_adds_up(model, run, readable_layout(batch, None, ())).findings
    return layers_by_type(model) + [each for each in findings if each.kind not in UNTESTED]


class _Comparison:
    """Four runs of some samples, and the causes where they do not add up."""

    def __init__(self, samples: ChosenSamples, names_layers: bool) -> None:
        self._samples, self._names_layers = samples, names_layers
        self._tolerance = samples.tolerance

    def result(self) -> AdditivityResult:
        """Run the whole and its parts; compare state, sums, gradients and the state left behind."""
        samples, cut = self._samples, self._samples.cut
        whole = samples.whole()
        self._tolerance = samples.tolerance
        self._moved = [key for key in samples.moved if not self._is_known(key)]
        try:
            first = samples.part(0, cut, backward=True, scale=1 / SCALE)
            try:
                second = self._second(lambda: self._leave_as(first), backward=True, scale=SCALE)
            except RuntimeError as problem:
                if not self._moved or isinstance(problem, torch.OutOfMemoryError):
                    raise
                self._second()  # raises too, if the state of the first part is not the reason
                return AdditivityResult(self._state_that_fails(first, problem))
            again = self._second()
        except (torch.OutOfMemoryError, Uncheckable):
            raise
        except Exception as problem:
            if self._names_layers and self.runs_now():
                raise
            why = f"cannot run on a part of them ({problem!r})"
            if isinstance(problem, IndexError):  # rows that point to rows: edges are no samples
                return AdditivityResult((not_tested(samples, why, is_finite=True),))
            return self._not_in_parts(why)
        if samples.reads_outputs:
            # Another output may have had as many rows as one run has samples.
            runs = (whole, first, second, again)
            common = set.intersection(*(set(run.terms) for run in runs))
            whole, first, second, again = (run.only(common) for run in runs)
        if samples.called.outside_norm is not None:
            return AdditivityResult((outside_norm(samples.name, samples.called.outside_norm),))
        if not whole.terms or not whole.units or not whole.is_finite:
            return AdditivityResult(conclusive=False)
        findings = tuple(self._moved_parameters())
        if not findings and not self._tolerance.same_again(second, again):
            findings = self._state_in_loss(first, second, again)
        if findings:
            return AdditivityResult(findings)
        parts = (first, again)
        if not samples.draws.held or not whole.drew_alike(parts):
            return self._without_random_numbers()
        if not all(part.is_finite for part in parts):  # a deviation of one sample
            return self._not_in_parts("is not finite for a part of them", is_finite=False)
        if not self._tolerance.adds_up(whole, parts):
            return AdditivityResult(self._causes(whole, first, again))
        if self._names_layers and (findings := self._other_cuts(whole)):
            return AdditivityResult(findings)
        if self._tolerance.gradient_gap(whole, (first, second)) is not None:
            if self._adds_up_in_full_precision():
                return AdditivityResult()
            return AdditivityResult((gradient_cause(samples, (whole, first, second)),))
        findings = tuple(self._state_after(whole, first, second, again))
        findings = findings or self._carried_over(again)
        # A mean of one unit is its sum: a part without units tells nothing of ignored labels.
        # So does a loss of exactly 0: a triplet loss without a triplet.
        tells = bool(whole.total) and all(part.units for part in parts)
        return AdditivityResult(findings, samples.reads_outputs or tells)

    # ------------------------------------------------------------ causes of a loss

    def _causes(self, whole: SampleRun, *parts: SampleRun) -> tuple[AuditFinding, ...]:
        """Return why the loss does not add up, by numbers and by changing one sample."""
        cause = loss_cause(self._samples, (whole, *parts), may_run=self._names_layers)
        names_layers = cause.kind == "loss" and self._names_layers
        return (names_layers and self._layers()) or (cause,)

    def _adds_up_in_full_precision(self) -> bool:
        """True if gradients that do not add up under autocast do without it.

        A 16-bit gradient of a deep network may be mostly rounding, which differs from part to part.
        Numbers of 32 bits take twice the memory: half of the samples, or of their tokens, run if
        they tell anything.
        """
        if not self._names_layers or not self._samples.called.sixteen_bit:
            return False
        free_memory_of_test()  # What autocast's runs leave would lie beside it.
        for samples in (self._samples.halved(), self._samples):
            try:
                with without_autocast():
                    whole = samples.whole()
                    first = samples.part(0, samples.cut, backward=True, scale=1 / SCALE)
                    second = samples.part(samples.cut, samples.count, backward=True, scale=SCALE)
            except (RuntimeError, ValueError, IndexError) as problem:  # It needs all its tokens.
                if samples is self._samples or isinstance(problem, torch.OutOfMemoryError):
                    raise
            else:
                if first.units and second.units:
                    break
        return samples.tolerance.gradient_gap(whole, (first, second)) is None

    def _other_cuts(self, whole: SampleRun) -> tuple[AuditFinding, ...]:
        """Return why few samples do not add up in other parts: one cut may add up by chance."""
        samples, count = self._samples, self._samples.count
        is_small = 4 <= count < SAMPLES and not samples.reads_outputs
        for other in range(1, count) if is_small else ():
            pair = [0, other]
            rest = [row for row in range(count) if row not in pair]
            try:
                parts = samples.of_rows(pair), samples.of_rows(rest)
            except (RuntimeError, ValueError):  # It needs more samples, or neighbours.
                return ()
            is_known = samples.draws.held and all(part.is_finite for part in parts)
            if is_known and not self._tolerance.adds_up(whole, parts):
                return (samples_compared(samples, (whole, *parts)),)
        return ()

    def runs_now(self) -> bool:
        """True if all runs after an error: it comes from elsewhere, and must be raised."""
        try:
            self._samples.whole()
            self._samples.part(0, self._samples.cut)
            self._second()
        except Exception:
            return False
        return True

    def _not_in_parts(self, why: str, *, is_finite: bool = True) -> AdditivityResult:
        """Refuse a loss that has no value for uneven parts: it may not add up."""
        layers: tuple[AuditFinding, ...] = ()
        if self._names_layers:
            with suppress(RuntimeError, ValueError):
                layers = self._layers()
        return AdditivityResult(layers or (not_tested(self._samples, why, is_finite=is_finite),))

    def _layers(self) -> tuple[AuditFinding, ...]:
        return tuple(layers_that_couple(self._samples, min(self._samples.count, SAMPLES)))

    def _without_random_numbers(self) -> AdditivityResult:
        """Compare in evaluation mode, where dropout draws nothing: the draws cannot be held."""
        samples = self._samples
        samples.graph = False
        try:
            with evaluation_mode(samples.model):
                whole = samples.whole()
                parts = samples.part(0, samples.cut), samples.part(samples.cut, samples.count)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # not a loss, or none in evaluation mode
            raise Uncheckable(repr(problem)) from None
        if not samples.draws.held or not whole.drew_alike(parts):
            _log.warning(
                "the loss was not tested to add up over micro-batches: the random numbers of %s "
                "cannot be given to parts of its samples (wb.verify compares whole updates)",
                samples.name,
            )
            return AdditivityResult()
        if samples.tolerance.adds_up(whole, parts):
            return AdditivityResult()
        return AdditivityResult(self._causes(whole, *parts))

    # ------------------------------------------------------------ state that a forward changes

    def _second(self, prepare: Callable[[], None] = lambda: None, **options: Any) -> SampleRun:
        samples = self._samples
        return samples.part(samples.cut, samples.count, prepare=prepare, **options)

    def _leave_as(self, run: SampleRun) -> None:
        if self._moved:
            run.after.restore(only=self._moved)

    def _is_known(self, key: Key) -> bool:
        """True for the state of layers that are judged by their type."""
        module = self._samples.start.module_of(key)
        return isinstance(module, (BatchNorm, InstanceNorm)) or (
            module is not None and is_spectral_norm(module)
        )

    def _state_in_loss(
        self, first: SampleRun, second: SampleRun, again: SampleRun
    ) -> tuple[AuditFinding, ...]:
        """Return the state that changes the loss of the next micro-batch."""
        is_outside = not self._moved
        if self._moved and self._names_layers:
            third = self._second()
            is_outside = not self._tolerance.same_again(again, third)
        if is_outside:
            return (_outside(second, again),)
        why = (
            f"and the loss depends on it: that of the same samples is {again.total:.6g} before and "
            f"{second.total:.6g} after"
        )
        return tuple(self._finding(key, first, why) for key in self._moved[:4])

    def _state_that_fails(self, first: SampleRun, problem: Exception) -> tuple[AuditFinding, ...]:
        """Return the state with which the next micro-batch cannot run: the hidden state of rows."""
        why = f"and the next micro-batch cannot run with it ({problem!r})"
        return tuple(self._finding(key, first, why) for key in self._moved[:4])

    def _carried_over(self, again: SampleRun) -> tuple[AuditFinding, ...]:
        """Return state that only as many samples read: a hidden state of the batch before."""
        if not self._moved or not self._names_layers:
            return ()
        third = self._second(lambda: self._leave_as(again))
        same = self._tolerance.same_again(again, third)
        return () if same else self._state_in_loss(again, third, again)

    def _state_after(
        self, whole: SampleRun, first: SampleRun, second: SampleRun, again: SampleRun
    ) -> Iterator[AuditFinding]:
        """Yield buffers and tensors that two parts leave otherwise than the whole does.

        Harmless are counters, sums over samples, and what depends on the last input alone.
        """
        close = 1e-9 if self._tolerance.relative < 1e-6 else 1e-4
        for key in self._moved:
            is_gone = whole.after.module_of(key) is None
            state = self._samples.start if is_gone else whole.after
            is_buffer = key[1] in getattr(state.module_of(key), "_buffers", ())
            is_log = not is_buffer and not isinstance(state.value(key), Tensor)
            same = whole.after.is_same(second.after, key, close)
            is_cache = again.after.is_same(second.after, key, close)
            if not (is_log or same or is_cache or self._is_counter(key, whole, first, second)):
                yield self._finding(
                    key, first, ("and two parts leave it at another value than the whole")
                )

    def _is_counter(self, key: Key, *runs: SampleRun) -> bool:
        """True for a number that moves by the same amount in each forward."""
        values = [state.value(key) for state in (self._samples.start, *(r.after for r in runs))]
        if not all(map(_is_number, values)):
            return False
        start, whole, first, second = map(float, values)
        return whole != start and first == whole and second - first == whole - start

    def _moved_parameters(self) -> Iterator[AuditFinding]:
        samples = self._samples
        for name, after in samples.weight_norms().items():
            before = samples.weights[name]
            if before != after:
                text = f"a forward changes this parameter (its norm: {before:.6g} → {after:.6g}), "
                text += f"so it moves once per micro-batch, not once per update. {_ADVICE}"
                yield AuditFinding(name, "Parameter", "state", text)
                return

    def _finding(self, key: Key, first: SampleRun, why: str) -> AuditFinding:
        start, after = self._samples.start, first.after
        owner = start.module_of(key) or after.module_of(key)
        names = {module: name for name, module in self._samples.model.named_modules()}
        module = "" if owner is None else names.get(owner, "")
        text = (
            f"moves once per micro-batch, not once per update ({_shown(start.value(key))} → "
            f"{_shown(after.value(key))} in one forward), {why}. {_ADVICE}"
        )
        name = f"{module}.{key[1]}" if module else key[1]
        return AuditFinding(name, type(owner).__name__, "state", text)


def _outside(run: SampleRun, again: SampleRun) -> AuditFinding:
    text = (
        f"the same samples give {run.total:.6g} and then {again.total:.6g}, from the same state of "
        "the model and with the same random numbers: something outside of the model changes with "
        "every call (a teacher that follows the model, a Python variable that the loss function "
        "sets). It would change once per micro-batch, not once per update: change it once per "
        "update, outside of the loss function"
    )
    return AuditFinding("(state outside of the model)", "Python", "outside", text)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() == 1:
        return f"{float(value):.6g}"
    if isinstance(value, Tensor):
        mean = float(value.double().mean()) if value.numel() else 0.0
        return f"a tensor of shape {tuple(value.shape)} with mean {mean:.6g}"
    return f"{len(value)} items" if isinstance(value, (list, dict)) else repr(value)[:40]
