"""What optimizers are given, where they are stepped in parts: the gradients of each update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Parts:
    """The gradients that steps in parts have seen, as those of whole updates."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._now: dict[int, Tensor] = {}
        self.steps = 0
        self.most = 0
        """How many parameters had a gradient at once."""

    def look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        there = [p for p in self._parameters if p.grad is not None]
        self.steps += 1
        self.most = max(self.most, len(there))
        for parameter in there:
            assert id(parameter) not in self._now, "a parameter was stepped twice in one update"
            assert parameter.grad is not None
            self._now[id(parameter)] = parameter.grad.detach().clone() * factor

    def take(self) -> list[Tensor]:
        """The gradients of the update that has just been made."""
        now, self._now = self._now, {}
        return [now.get(id(p), torch.zeros_like(p)) for p in self._parameters]


@contextmanager
def watching(model: nn.Module) -> Iterator[Parts]:
    parts = Parts(model)
    handle = register_optimizer_step_pre_hook(parts.look)
    try:
        yield parts
    finally:
        handle.remove()
