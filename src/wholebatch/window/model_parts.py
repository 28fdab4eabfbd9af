"""The parts of a model: what decides its results beside its weights."""

from __future__ import annotations

from functools import partial
from types import NoneType
from typing import Any

from torch import nn

_NUMBERS = (int, float, str, NoneType)


class ModelParts:
    """The modules of a model with their hooks, as they were when this object was made.

    With `numbers`, the numbers and strings among their attributes too. It is compared at each
    window or micro-step, while a GPU waits: so there are few steps of Python per module.
    """

    def __init__(self, model: nn.Module, *, numbers: bool = False) -> None:
        modules = [vars(module) for module in model.modules()]
        parts = [
            part
            for fields in modules
            for name, part in fields.items()
            if name == "_modules" or (name.endswith("_hooks") and isinstance(part, dict))
        ]
        self._empty = [part for part in parts if not part]
        self.filled = [(part, list(part.items())) for part in parts if part]
        """The dictionaries that are not empty, with what they held."""
        self._ids = set(map(id, parts))
        self._numbers = []
        for fields in modules if numbers else ():
            names = [name for name, value in fields.items() if isinstance(value, _NUMBERS)]
            read = partial(self._read, fields, names)
            self._numbers.append((read, read()))

    @staticmethod
    def _read(fields: dict[str, Any], names: list[str]) -> list[Any]:
        return [len(fields), *map(fields.get, names)]

    def hold(self) -> bool:
        """True if all of it is as it was."""
        try:
            return (
                not any(self._empty)
                and all([*part.items()] == before for part, before in self.filled)
                and all(read() == before for read, before in self._numbers)
            )
        except (RuntimeError, ValueError):  # a number has become a tensor or an array
            return False

    def include(self, part: Any) -> bool:
        """True if `hold` compares this dictionary of modules or hooks."""
        return id(part) in self._ids
