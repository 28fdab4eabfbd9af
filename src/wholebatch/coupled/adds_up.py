"""Check that a loss adds up: total, units and gradient of some samples are those of their halves.

Accumulation is exact if this holds. So it is checked once, on a few samples of the user's own data
and with the user's own loss function, before anything is trained:

```python
result = check_adds_up(model, lambda few: loss(model, few), layout_of(batch))
result.refuse()        # raises LossError or UnsupportedError with the causes and the ways out
```
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.stateless import _reparametrize_module

from wholebatch.batch.samples import Layout
from wholebatch.coupled.causes import (
    AuditFinding,
    gradient_cause,
    layers_that_couple,
    loss_cause,
    outside_norm,
    samples_compared,
)
from wholebatch.coupled.normalisation_layers import evaluation_mode, is_spectral_norm
from wholebatch.coupled.sample_runs import (
    SCALE,
    FirstSamples,
    LocalCollectiveError,
    OwnBackward,
    SampleRun,
    Uncheckable,
    weight_norms,
)
from wholebatch.errors import LossError, UnsupportedError
from wholebatch.window.forward_state import Key

_FAR = 1000
_ADVICE = (
    "Move it once per update, outside of the forward; or freeze it. If it is set only once, from "
    "the first batch, run that batch through the model before training"
)


class MovingState:
    """The state that the run of the whole has moved, and the runs of the halves that judge it.

    A window runs several forwards where the undivided batch runs one. A running mean, a codebook
    that follows its inputs or a queue then moves several times, and the samples of a window no
    longer see the same model. Harmless are counters that nothing reads, caches, logs, and what adds
    up: sums over samples, largest and smallest values.

    `second` is run from the state that `first` has left, `again` from that at the start; with
    `again=False` only if any state has moved. The state of known layers is left out: BatchNorms and
    InstanceNorms move theirs once per window, and of spectral normalisation a warning was given.
    """

    def __init__(self, samples: FirstSamples, whole: SampleRun, *, again: bool) -> None:
        self._samples, self._whole = samples, whole
        self._moved = [key for key in samples.start.moved(whole.after) if not self._is_known(key)]
        self.first = samples.part(0, samples.half, backward=True, scale=1 / SCALE)
        self.second = self._second_half(self._leave_as_first, backward=True, scale=SCALE)
        self.again = self.second
        if again or self._moved:
            self.again = replace(self._second_half(), digests=self.second.digests)

    def findings_in_loss(self) -> tuple[AuditFinding, ...]:
        """Return the moved state that changes the loss of the next micro-batch."""
        parameter = self._moved_parameter()
        if parameter is not None:
            return (parameter,)
        second, again, tolerance = self.second, self.again, self._samples.tolerance
        if second.is_identical(again):
            return ()
        third = self._second_half()
        if not tolerance.same_again(again, third):
            return (_outside(again, third),)
        # The same again from both states, or else kernels that differ from run to run.
        repeated = self._second_half(self._leave_as_first)
        noisy = not (again.is_identical(third) and second.is_identical(repeated))
        if noisy and tolerance.same_again(second, again):
            return ()
        if not self._moved:
            return () if tolerance.same_again(second, again) else (_outside(second, again),)
        why = (
            f"and the loss depends on it: that of the same samples is {again.total:.6g} before and "
            f"{second.total:.6g} after"
        )
        return tuple(self._finding(key, why) for key in self._to_blame())

    def findings_in_state(self) -> tuple[AuditFinding, ...]:
        """Return the moved state that changes no loss yet, and is not harmless either."""
        found = []
        close = 1e-9 if self._samples.tolerance.relative < 1e-6 else 1e-4
        for key in self._moved:
            is_harmless = self._counts(key) or self._whole.after.is_same(
                self.second.after, key, close
            )
            is_cache = self.again.after.is_same(self.second.after, key, close)
            if is_harmless and not is_cache and self._is_read(key):
                found.append(self._finding(key, "and the forward reads it"))
            elif not (is_harmless or is_cache or self._is_log(key)):
                found.append(
                    self._finding(key, "and two halves leave another value than the whole")
                )
        return tuple(found)

    def _leave_as_first(self) -> None:
        if self._moved:
            self.first.after.restore(only=self._moved)

    def _second_half(self, prepare: Callable[[], None] = lambda: None, **options: Any) -> SampleRun:
        samples = self._samples
        return samples.part(samples.half, samples.count, prepare=prepare, **options)

    def _is_known(self, key: Key) -> bool:
        item = self._samples.start.items.get(key) or self._whole.after.items[key]
        module = item.module
        return isinstance(module, (_BatchNorm, _InstanceNorm)) or is_spectral_norm(module)

    def _to_blame(self) -> list[Key]:
        """Return the items that change the loss by themselves; if none does, the first ones."""
        if len(self._moved) == 1:
            return self._moved

        def alone(key: Key) -> SampleRun:
            return self._second_half(lambda: self.first.after.restore(only=[key]))

        acting = [key for key in self._moved[:8] if not alone(key).is_identical(self.again)]
        return acting or self._moved[:4]

    def _counts(self, key: Key) -> bool:
        """True for a number that moves by the same amount in each forward."""
        states = (self._whole.after, self.first.after, self.second.after)
        values = [state.value(key) for state in (self._samples.start, *states)]
        if not all(map(_is_number, values)):
            return False
        start, whole, first, second = map(float, values)
        step = whole - start
        return bool(step) and first - start == step and second - first == step

    def _is_read(self, key: Key) -> bool:
        """True if the loss changes when this counter is far ahead."""
        item = self._samples.start.items.get(key)
        if item is None or not _is_number(item.kept.copy) or isinstance(item.kept.copy, bool):
            return False

        def go_ahead() -> None:
            value = getattr(item.module, item.name)
            if isinstance(value, Tensor):
                value.add_(_FAR)
            else:
                setattr(item.module, item.name, value + _FAR)

        try:
            run = self._second_half(go_ahead)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # an index that is out of range now
            return True
        return not self._samples.tolerance.same_again(run, self.again)

    def _is_log(self, key: Key) -> bool:
        """True for plain Python values, which no state dict holds."""
        item = self._whole.after.items.get(key) or self._samples.start.items[key]
        return not item.is_buffer and not isinstance(item.kept.copy, Tensor)

    def _moved_parameter(self) -> AuditFinding | None:
        model = self._samples.model
        now = weight_norms(model)
        for name, parameter in model.named_parameters():
            before, after = self._samples.weights.get(parameter), now.get(parameter)
            if before is not None and after is not None and before != after:
                text = f"a forward changes this parameter (its norm: {before:.6g} → {after:.6g}), "
                text += f"so it moves once per micro-batch, not once per update. {_ADVICE}"
                return AuditFinding(name, "Parameter", "state", text)
        return None

    def _finding(self, key: Key, why: str) -> AuditFinding:
        start, after = self._samples.start, self.first.after
        item = start.items.get(key) or after.items[key]
        names = {id(module): name for name, module in self._samples.model.named_modules()}
        module = names.get(id(item.module), "")
        text = (
            f"moves once per micro-batch, not once per update ({_shown(start.value(key))} → "
            f"{_shown(after.value(key))} in one forward), {why}. {_ADVICE}"
        )
        name = f"{module}.{item.name}" if module else item.name
        return AuditFinding(name, type(item.module).__name__, "state", text)


def _outside(one: SampleRun, other: SampleRun) -> AuditFinding:
    text = (
        f"the same samples give {one.total:.6g} and then {other.total:.6g}, from the same state of "
        "the model and with the same random numbers: something outside of the model moves with "
        "every call (a Python variable that the loss function changes). It would move once per "
        "micro-batch, not once per update: change it once per step, outside of the loss function"
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


_log = logging.getLogger("wholebatch")

SAMPLES = 8  # at most so many are looked at
_ENOUGH = 4
_DRAWS = 8
_SHARED = (
    "%s draws random numbers that are not for single samples (%s), and its loss depends on them: "
    "the whole batch would draw them once, and a window draws them once for each micro-batch. If "
    "all samples are to have the same, draw them before the step and give them with the batch "
    "(static=, if they have a first dimension)"
)
_COMPARES = (
    "%s seems to compare samples with each other: with the same random numbers, the losses of two "
    "groups of %d samples are together %.6g, and %.6g when they exchange halves. Each micro-batch "
    "would only be compared with itself: if so, give wb.Coupled(encode, loss), which sees the "
    "whole batch"
)
_MISTAKES = ("mean", "sum", "added", "units", "divided")


@dataclass(frozen=True, slots=True)
class LookResult:
    """The findings of a look; not `conclusive` if there were no two samples, or no units.

    `checked` is False if the loss could not be checked at all. `warned`: the log has a warning.
    """

    findings: tuple[AuditFinding, ...] = ()
    conclusive: bool = True
    checked: bool = True
    warned: bool = False

    def refuse(self, off: str = "audit=False", on_another_rank: bool = False) -> None:
        """Raise if anything was found, here or on another rank.

        `off` is the option with which a user of this entry point trains all the same.
        """
        if not self.findings and not on_another_rank:
            return
        listed = "\n  ".join(map(str, self.findings)) or "(found on another rank)"
        message = (
            "micro-batches cannot give the update of the whole batch here:\n  "
            f"{listed.rstrip('.')}.\n{off} trains it all the same: what was named is then computed "
            "for each micro-batch alone"
        )
        mistaken = self.findings and all(f.kind in _MISTAKES for f in self.findings)
        raise LossError(message) if mistaken else UnsupportedError(message)


def check_adds_up(
    model: nn.Module,
    run: Callable[[Any], Any],
    layout: Layout | None,
    *,
    micro_batch: int | None = None,
    outputs: bool = False,
    name: str = "the loss function",
) -> LookResult:
    """Compare the first samples of a batch with their halves, forward and backward.

    `run(few)` runs forward and loss function as training does, precision included, on a batch of
    the same structure; it returns a `Loss`, `Terms` or a tensor of per-unit losses (with
    `outputs=True` a structure of tensors that have a row for each sample). 2 to 8 samples are run
    with their gradient, so many that all runs cost no more than a micro-batch of `micro_batch`
    samples (default: the batch is one). Where these are only 2, up to 8 are run without their
    gradient too; so are 4 to 8 whose labels and masks differ most, and last as many as a
    micro-batch has: the largest 20 losses show only among more than 20. `name` is how findings
    call the function.

    `model` holds all modules that are trained. It is left as found: parameters, gradients, buffers,
    attributes and random generators. A DDP model must be in `no_sync`; a model whose forwards run
    collectives (FSDP, DeepSpeed) cannot be looked at, unless all ranks look at the same time.
    """
    if layout is None or layout.size < 2:
        return LookResult(conclusive=False)
    micro_batch = micro_batch or layout.size
    # In forwards of one sample, n samples with their gradient cost 6.5 n (forward and backward of
    # 2 n and a forward of n/2), and a micro-batch of m samples 3 m.
    count = min(layout.size, max(2, min(SAMPLES, 6 * micro_batch // 13)))
    more = min(layout.size, SAMPLES, 3 * micro_batch)
    most = min(layout.size, micro_batch)
    given: dict[str, Any] = {"outputs": outputs, "name": name, "micro_batch": micro_batch}
    samples = partial(FirstSamples, model, run, layout, **given)
    try:
        return _Look(samples, _power_of_two(count), more, most).result()
    except Uncheckable as reason:
        _log.debug("the loss was not looked at: %s", reason)
        return LookResult(checked=False)
    finally:
        _release()


class _Look:
    """One look: the samples beside their halves, and where these differ, why.

    `samples(count, graph=)` makes the samples. Their gradient is looked at for `count` of them, and
    their loss for `more`, then for `most`.
    """

    def __init__(
        self, samples: Callable[..., FirstSamples], count: int, more: int, most: int
    ) -> None:
        self._samples, self._count, self._more, self._most = samples, count, more, most
        self._told_of_draws = False

    def result(self) -> LookResult:
        try:
            made = self._looked(self._samples(self._count, graph=True))
        except (torch.OutOfMemoryError, LocalCollectiveError) as reason:
            _log.debug("gradients are not looked at, only forwards: %r", reason)
            made = None
        if made is None:
            _release(thoroughly=True)
            made = self._looked(self._samples(self._count, graph=False))
        more = _power_of_two(self._more)
        if not made.findings and made.conclusive and self._count < min(more, _ENOUGH):
            # Two samples may have nothing to do with each other; of eight some have.
            made = self._looked_at_more(more, again=True) or made
        if not made.findings and more > 1:  # Two halves may have equally many labels, or none.
            few = min(more, max(self._count, _ENOUGH)) if made.conclusive else more
            other = self._looked_at_more(few, varied=True, again=made.conclusive)
            made = other if other and (other.findings or not made.conclusive) else made
        if not made.findings and self._most > more:
            made = self._looked_at_most() or made
        return replace(made, warned=self._told_of_draws)

    def _looked_at_most(self) -> LookResult | None:
        """Look at as many samples as a micro-batch has, cut in one place; None if nothing is found.

        Groups of neighbours that a micro-batch of m holds whole are whole in m / p samples, too,
        for a prime factor p of m: what adds up at one of these cuts is exact.
        """
        self._more, found = self._most, None
        for prime in (n for n in range(2, self._most + 1) if self._most % n == 0 and _is_prime(n)):
            found = self._looked_at_more(self._most, again=True, half=self._most // prime)
            if found is None or not found.findings:
                return None
        return found

    def _looked_at_more(
        self, count: int, *, again: bool, varied: bool = False, half: int | None = None
    ) -> LookResult | None:
        """Look at the loss of `count` samples; None if it cannot be, or these were seen `again`."""
        for graph in (False, True):
            try:
                samples = self._samples(count, graph=graph, varied=varied, half=half)
                if again and varied and not samples.is_varied:
                    return None
                return self._looked(samples, again=again)
            except OwnBackward:
                continue
            except (torch.OutOfMemoryError, Uncheckable):
                break
        return None

    def _looked(self, samples: FirstSamples, *, again: bool = False) -> LookResult:
        """Look at these samples; `again` if nothing was found in fewer of them."""
        with samples.looking():
            found = self._compared(samples, looked=again)
        return found if isinstance(found, LookResult) else self._named(samples, *found)

    def _compared(
        self, samples: FirstSamples, *, looked: bool
    ) -> LookResult | tuple[SampleRun, ...]:
        """Return the result, or the runs that do not add up: the whole, and its halves."""
        whole = samples.whole()
        if samples.called.outside_norm is not None:
            return LookResult((outside_norm(samples.name, samples.called.outside_norm),))
        if not whole.terms or not whole.units or not whole.is_finite:
            return LookResult(conclusive=False)
        try:
            # Without state that moves, the same samples would give the same once more.
            state = MovingState(samples, whole, again=not looked)
        except (torch.OutOfMemoryError, Uncheckable):
            raise
        except Exception as problem:
            _log.debug("a half of %s samples could not be run: %r", samples.count, problem)
            return (whole,)
        halves = (state.first, state.again)
        if not all(half.is_finite for half in halves):
            return (whole,)
        found = state.findings_in_loss()
        if found:
            return LookResult(found)
        tolerance = samples.tolerance
        if tolerance.adds_up(whole, halves):
            self._warn_of_shared_draws(samples, whole, state.first)
            found = state.findings_in_state()
            if found or not tolerance.gradient_gap(whole, halves):
                # A mean of one unit is its sum: nothing is seen of ignored labels.
                conclusive = samples.reads_outputs or all(half.units for half in halves)
                return LookResult(found, conclusive)
        if not samples.draws.held or not whole.drew_alike(halves):
            return self._without_draws(samples)
        return (whole, *halves)

    def _warn_of_shared_draws(
        self, samples: FirstSamples, whole: SampleRun, half: SampleRun
    ) -> None:
        """Warn of a loss that depends on draws for the whole batch: mixup's one factor, a layer
        that is skipped, noise on weights."""
        shared = samples.draws.shared
        if not samples.start.draws_same(whole.after, host=True) and whole.drew_alike([half]):
            shared = shared or "of Python or NumPy"
        if not shared or self._told_of_draws:
            return
        other = samples.part(0, samples.half, prepare=samples.draw_ahead, renews=True)
        if not samples.tolerance.same_again(half, other):
            self._told_of_draws = True
            _log.warning(_SHARED, samples.name, shared)

    def _without_draws(self, samples: FirstSamples) -> LookResult | tuple[SampleRun, ...]:
        """Look again in evaluation mode, where dropout draws nothing."""
        _log.debug("random numbers could not be held: a look in evaluation mode")
        graph, samples.graph = samples.graph, False
        try:
            with evaluation_mode(samples.model):
                whole, halves = samples.whole(), samples.halves()
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # not a loss, or none in evaluation mode
            raise Uncheckable(repr(problem)) from None
        finally:
            samples.graph = graph
        if samples.tolerance.adds_up(whole, halves):
            return LookResult()
        if not samples.draws.held or not whole.drew_alike(halves):
            self._warn_of_random_comparisons(samples)
            raise Uncheckable("random numbers cannot be held")
        return (whole, *halves)

    def _warn_of_random_comparisons(self, samples: FirstSamples) -> None:
        """Warn of a loss that compares samples, although its draws cannot be held.

        Runs of one shape draw the same numbers. With two pairs of parts that are exchanged,

            L(a, b) + L(c, d) = L(c, b) + L(a, d)

        if and only if each sample counts by itself.
        """
        part = min(self._more, samples.layout.size) // 4
        if not part:
            return
        a, b, c, d = ([*range(i * part, (i + 1) * part)] for i in range(4))
        for skip in range(_DRAWS):  # one draw may happen to keep the parts apart
            try:
                runs = [samples.run_rows(x + y, skip) for x, y in ((a, b), (c, d), (c, b), (a, d))]
            except (torch.OutOfMemoryError, Uncheckable, RuntimeError, ValueError):
                return
            one, other, exchanged, back = (run.total for run in runs)
            size = max(abs(one) + abs(other), abs(exchanged) + abs(back))
            if not samples.tolerance.near(one + other, exchanged + back, size):
                _log.warning(_COMPARES, samples.name, 2 * part, one + other, exchanged + back)
                return

    def _named(self, samples: FirstSamples, whole: SampleRun, *halves: SampleRun) -> LookResult:
        """Name the cause; there are no `halves` if these could not be run."""
        runs = (whole, *halves)
        if halves and samples.tolerance.adds_up(whole, halves):
            if self._adds_up_in_float64(samples):
                return LookResult()
            with samples.looking():
                return LookResult((gradient_cause(samples, runs),))
        compared = (samples_compared(samples, runs),) if halves else ()
        try:
            return LookResult(self._causes_by_more() or compared)
        except torch.OutOfMemoryError:
            return LookResult(compared)
        except Uncheckable:  # a loss that runs a backward of its own
            with samples.looking():
                return LookResult((loss_cause(samples, runs),) if halves else ())

    def _adds_up_in_float64(self, samples: FirstSamples) -> bool:
        """Tell if the gap between gradients is rounding: a mistake is as large in float64.

        A deep network amplifies rounding: with 24 convolutions and BatchNorms, to 5% of a gradient.
        """
        model, layout, half = samples.model, samples.layout, samples.half
        held: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
        copies = {n: _doubled(t.detach()).requires_grad_(t.requires_grad) for n, t in held.items()}
        leaves = tuple(replace(leaf, value=_doubled(leaf.value)) for leaf in layout.leaves)
        try:
            with _reparametrize_module(model, copies, tie_weights=True):
                wide = self._samples(samples.count, graph=True)
                wide.layout = replace(layout, leaves=leaves)
                with wide.looking():
                    whole = wide.whole()
                    ends = ((0, half, 1 / SCALE), (half, samples.count, SCALE))
                    parts = [wide.part(a, b, backward=True, scale=by) for a, b, by in ends]
                seen = all(run.digests is not None for run in (whole, *parts))
                return seen and not samples.tolerance.gradient_gap(whole, parts)
        except Exception as problem:  # what does not run in float64 is judged as it was
            _log.debug("the samples could not be run in float64: %r", problem)
            return False

    def _causes_by_more(self) -> tuple[AuditFinding, ...]:
        """Return the causes that more samples show, in forwards only."""
        samples = self._samples(_power_of_two(self._more), graph=False)
        with samples.looking():
            try:
                whole, halves = samples.whole(), samples.halves()
            except (torch.OutOfMemoryError, Uncheckable):
                raise
            except Exception:  # a layer that needs more samples than a half has
                return layers_that_couple(samples, self._more)
            if not samples.draws.held or not whole.drew_alike(halves):
                return ()
            found = loss_cause(samples, (whole, *halves))
            if found.kind != "loss":
                return (found,)
            layers = layers_that_couple(samples, self._more)
            return layers or (() if samples.tolerance.adds_up(whole, halves) else (found,))


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number: pairs and groups of samples stay together."""
    return 1 << number.bit_length() - 1


def _release(*, thoroughly: bool = False) -> None:
    if thoroughly:
        gc.collect()
    torch.clear_autocast_cache()
    if torch.cuda.is_initialized():  # what comes now stays: not in the gaps of what was
        torch.cuda.empty_cache()
