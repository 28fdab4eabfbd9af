"""What optimizers are given, where they are stepped in parts: the gradients of each update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support import knows_grad_scale


class Parts:
    """The gradients that steps in parts have seen, as those of whole updates."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._now: dict[int, Tensor] = {}
        self._before: list[dict[int, Tensor]] = []
        self.steps = 0
        self.most = 0
        """How many parameters had a gradient at once."""

    def look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        self.steps += 1
        self.most = max(self.most, sum(p.grad is not None for p in self._parameters))
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            if id(parameter) in self._now:  # an update that nobody has taken was over
                self._before.append(self._now)
                self._now = {}
            self._now[id(parameter)] = parameter.grad.detach().clone() * factor

    def take(self) -> list[Tensor]:
        """The gradients of the one update that was made since the last time."""
        (gradients,) = self.take_all()
        return gradients

    def take_all(self) -> list[list[Tensor]]:
        """The gradients of every update that was made since the last time."""
        taken, self._before, self._now = [*self._before, self._now], [], {}
        return [[one.get(id(p), torch.zeros_like(p)) for p in self._parameters] for one in taken]


knows_grad_scale(Parts.look)


@contextmanager
def watching(model: nn.Module) -> Iterator[Parts]:
    parts = Parts(model)
    handle = register_optimizer_step_pre_hook(parts.look)
    try:
        yield parts
    finally:
        handle.remove()
