"""The modules of a model and their hooks, compared with what they were."""

from __future__ import annotations

from typing import Any

from torch import nn


class ModelParts:
    """The modules of a model with their hooks, as they were when this object was made.

    It is compared at each micro-step, while a GPU waits: so there are few steps of Python per
    module.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = [
            part
            for module in model.modules()
            for name, part in vars(module).items()
            if name == "_modules" or (name.endswith("_hooks") and isinstance(part, dict))
        ]
        self._empty = [part for part in parts if not part]
        self.filled = [(part, list(part.items())) for part in parts if part]
        """The dictionaries that are not empty, with what they held."""
        self._ids = set(map(id, parts))

    def hold(self) -> bool:
        """True if all of it is as it was."""
        return not any(self._empty) and all(
            [*part.items()] == before for part, before in self.filled
        )

    def include(self, part: Any) -> bool:
        """True if `hold` compares this dictionary of modules or hooks."""
        return id(part) in self._ids
