"""State that a forward moves: harmless, or once per micro-batch where it must be once per update.

A window runs several forwards where the undivided batch runs one. A running mean, a codebook that
follows its inputs or a queue then moves several times, and the samples of a window no longer see
the same model. Harmless are counters that nothing reads, caches, logs, and what adds up: sums over
samples, largest and smallest values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from wholebatch.core.forward_state import ForwardState, Key
from wholebatch.coupled.causes import Finding
from wholebatch.coupled.normalisation_layers import is_spectral_norm
from wholebatch.coupled.sample_runs import Few, Run, Tolerance, identical, weight_norms

__all__ = ["Moving"]

_FAR = 1000
_ADVICE = (
    "Move it once per update, outside of the forward; or freeze it. If it is set only once, from "
    "the first batch, run that batch through the model before training"
)


class Moving:
    """The state that the run of the whole has moved, but for that of known layers.

    BatchNorms and InstanceNorms move their running statistics once per window; of spectral
    normalisation a warning was given.
    """

    def __init__(self, few: Few, whole: Run) -> None:
        self._few = few
        self._whole = whole
        self._moved = [key for key in few.start.moved(whole.after) if not self._is_known(key)]

    @property
    def any(self) -> bool:
        """True if anything has moved."""
        return bool(self._moved)

    def _is_known(self, key: Key) -> bool:
        item = self._few.start.items.get(key) or self._whole.after.items[key]
        module = item.module
        return isinstance(module, (_BatchNorm, _InstanceNorm)) or is_spectral_norm(module)

    def as_left_by(self, run: Run) -> Callable[[], None]:
        """Return a function that puts the moved state to where `run` has left it."""
        return lambda: run.after.restore(only=self._moved) if self._moved else None

    def acting(
        self, first: Run, second: Run, again: Run, tolerance: Tolerance
    ) -> tuple[Finding, ...]:
        """Findings if the loss of the second half depends on what the first half has moved.

        `second` was run from the state that `first` has left, `again` from that at the start.
        """
        parameter = self._moved_parameter()
        if parameter is not None:
            return (parameter,)
        if identical(second, again):
            return ()
        third = self._second()
        if not tolerance.same_again(again, third):
            return (_outside(again, third),)
        # The same again from both states, or else kernels that differ from run to run.
        repeated = self._second(self.as_left_by(first))
        noisy = not (identical(again, third) and identical(second, repeated))
        if noisy and tolerance.same_again(second, again):
            return ()
        if self._moved:
            blamed = self._to_blame(first, again)
            return tuple(self._acts(key, first, second, again) for key in blamed)
        return () if tolerance.same_again(second, again) else (_outside(second, again),)

    def kept(
        self, first: Run, second: Run, again: Run, tolerance: Tolerance
    ) -> tuple[Finding, ...]:
        """Findings for state that acts on no loss yet, and is not harmless either."""
        found = []
        close = 1e-9 if tolerance.relative < 1e-6 else 1e-4
        for key in self._moved:
            is_counter = _counts(self._states(first, second), key)
            adds_up = self._whole.after.is_same(second.after, key, close)
            is_cache = again.after.is_same(second.after, key, close)
            if (is_counter or adds_up) and not is_cache and self._is_read(key, again, tolerance):
                found.append(self._finding(key, first, "and the forward reads it"))
            elif not (is_counter or adds_up or is_cache or self._is_log(key)):
                found.append(
                    self._finding(key, first, "and two halves leave another value than the whole")
                )
        return tuple(found)

    def _states(self, first: Run, second: Run) -> tuple[ForwardState, ...]:
        return (self._few.start, self._whole.after, first.after, second.after)

    def _second(self, prepare: Callable[[], None] = lambda: None) -> Run:
        return self._few.part(self._few.count // 2, self._few.count, prepare=prepare)

    def _to_blame(self, first: Run, again: Run) -> list[Key]:
        """The items that change the loss by themselves; all, if none does."""
        if len(self._moved) == 1:
            return self._moved

        def alone(key: Key) -> Run:
            return self._second(lambda: first.after.restore(only=[key]))

        acting = [key for key in self._moved[:8] if not identical(alone(key), again)]
        return acting or self._moved[:4]

    def _is_read(self, key: Key, again: Run, tolerance: Tolerance) -> bool:
        """True if the loss changes when this counter is far ahead."""

        def ahead() -> None:
            item = self._few.start.items[key]
            held: Any = item.module._buffers if item.is_buffer else item.module.__dict__
            if isinstance(held[item.name], Tensor):
                held[item.name].add_(_FAR)
            else:
                held[item.name] = held[item.name] + _FAR

        value = self._few.start.value(key)
        if not _is_number(value) or isinstance(value, bool):
            return False
        try:
            with torch.no_grad():
                run = self._second_of(ahead)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # an index that is out of range now
            return True
        return not tolerance.same_again(run, again)

    def _second_of(self, prepare: Callable[[], None]) -> Run:
        with torch.enable_grad():
            return self._second(prepare)

    def _is_log(self, key: Key) -> bool:
        """True for plain Python values, which no state dict holds."""
        item = self._whole.after.items.get(key) or self._few.start.items[key]
        return not item.is_buffer and not isinstance(item.kept.copy, Tensor)

    def _moved_parameter(self) -> Finding | None:
        few = self._few
        now = weight_norms(few.model)
        for name, parameter in few.model.named_parameters():
            before, after = few.weights.get(parameter), now.get(parameter)
            if before is not None and after is not None and before != after:
                text = f"a forward changes this parameter (its norm: {before:.6g} → {after:.6g}), "
                text += f"so it moves once per micro-batch, not once per update. {_ADVICE}"
                return Finding(name, "Parameter", "state", text)
        return None

    def _acts(self, key: Key, first: Run, second: Run, again: Run) -> Finding:
        why = (
            f"and the loss depends on it: that of the same samples is {again.total:.6g} before and "
            f"{second.total:.6g} after"
        )
        return self._finding(key, first, why)

    def _finding(self, key: Key, first: Run, why: str) -> Finding:
        item = self._few.start.items.get(key) or first.after.items[key]
        names = {id(module): name for name, module in self._few.model.named_modules()}
        module = names.get(id(item.module), "")
        before, after = (_shown(state.value(key)) for state in (self._few.start, first.after))
        text = (
            f"moves once per micro-batch, not once per update ({before} → {after} in one forward), "
            f"{why}. {_ADVICE}"
        )
        name = f"{module}.{item.name}" if module else item.name
        return Finding(name, type(item.module).__name__, "state", text)


def _outside(one: Run, other: Run) -> Finding:
    text = (
        f"the same samples give {one.total:.6g} and then {other.total:.6g}, from the same state of "
        "the model and with the same random numbers: something outside of the model moves with "
        "every call (a Python variable that the loss function changes). It would move once per "
        "micro-batch, not once per update: change it once per step, outside of the loss function"
    )
    return Finding("(state outside of the model)", "Python", "outside", text)


def _counts(states: tuple[ForwardState, ...], key: Key) -> bool:
    """True for a number that moves by the same amount in each forward."""
    values = [state.value(key) for state in states]
    if not all(map(_is_number, values)):
        return False
    start, whole, first, second = map(float, values)
    step = whole - start
    return bool(step) and first - start == step and second - first == step


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
    if isinstance(value, (list, dict)):
        return f"{len(value)} items"
    return repr(value)[:40]
