"""Keys of moments (`packed`), made for all of them at once: each by itself is many kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholebatch.offload.packed_moments import Key, keys_of

__all__ = ["Ready", "real"]

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Made:
    """A key, and the moments that it is of."""

    key: Key
    moments: tuple[Tensor, Tensor]
    versions: tuple[int, int]

    @classmethod
    def of(cls, state: State, key: Key) -> _Made:
        first, second = state["exp_avg"], state["exp_avg_sq"]
        return cls(key, (first, second), (first._version, second._version))

    def holds(self, state: State) -> bool:
        """Whether the moments are what they were."""
        first, second = self.moments
        return (
            state["exp_avg"] is first
            and state["exp_avg_sq"] is second
            and (first._version, second._version) == self.versions
        )


class Ready:
    """Keys that wait for their use, for moments that nobody has changed since."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}

    def key(self, number: int, state: State, everyones: Callable[[], Mapping[int, State]]) -> Key:
        """The key of these moments; where it is not there, those of `everyones` are made too."""
        made = self._made.get(number)
        if made is None or not made.holds(state):
            self._make({**everyones(), number: state})
        return self._made[number].key

    def _make(self, states: Mapping[int, State]) -> None:
        kinds: dict[Any, dict[int, State]] = {}
        for number, state in states.items():
            first = state["exp_avg"]
            kinds.setdefault((first.dtype, first.device), {})[number] = state
        for alike in kinds.values():
            keys = keys_of(
                [real(state["exp_avg"]) for state in alike.values()],
                [real(state["exp_avg_sq"]) for state in alike.values()],
                [state["step"] for state in alike.values()],
            )
            for (number, state), key in zip(alike.items(), keys, strict=True):
                self._made[number] = _Made.of(state, key)

    def clear(self) -> None:
        self._made.clear()


def real(tensor: Tensor) -> Tensor:
    """The tensor, or both parts of its complex numbers, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
