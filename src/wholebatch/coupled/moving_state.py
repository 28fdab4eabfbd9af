"""Find state that a forward moves once per micro-batch, and that must move once per update.

A window runs several forwards where the undivided batch runs one. A running mean, a codebook that
follows its inputs or a queue then moves several times, and the samples of a window no longer see
the same model. Harmless are counters that nothing reads, caches, logs, and what adds up: sums over
samples, largest and smallest values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from wholebatch.core.forward_state import Key
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.normalisation_layers import is_spectral_norm
from wholebatch.coupled.sample_runs import FirstSamples, SampleRun, weight_norms

_FAR = 1000
_ADVICE = (
    "Move it once per update, outside of the forward; or freeze it. If it is set only once, from "
    "the first batch, run that batch through the model before training"
)


class MovingState:
    """The state that the run of the whole has moved, and the runs of the halves that judge it.

    `second` is run from the state that `first` has left, `again` from that at the start; with
    `again=False` only if any state has moved. The state of known layers is left out: BatchNorms and
    InstanceNorms move theirs once per window, and of spectral normalisation a warning was given.
    """

    def __init__(self, samples: FirstSamples, whole: SampleRun, *, again: bool) -> None:
        self._samples, self._whole = samples, whole
        self._moved = [key for key in samples.start.moved(whole.after) if not self._is_known(key)]
        half = samples.count // 2
        self.first = samples.part(0, half, backward=True, scale=0.25)
        self.second = self._second_half(self._leave_as_first, backward=True, scale=0.25)
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
        count = self._samples.count
        return self._samples.part(count // 2, count, prepare=prepare, **options)

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
