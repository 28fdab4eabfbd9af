"""Failures on purpose: out of memory at the n-th operation of a forward or backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.memory import MemoryMeter


class OutOfMemoryAt(TorchDispatchMode):
    """Raises torch.OutOfMemoryError once, instead of the n-th operation (from 0) of a phase.

    `phase` is "forward", "backward" or "any". `seen` counts the operations of that phase, so a
    run that does not fail says how many there are to fail at.
    """

    def __init__(self, n: int | None = None, *, phase: str = "any") -> None:
        super().__init__()
        self.n = n
        self.phase = phase
        self.seen = 0
        self.failed_at: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        if self.phase in ("any", "backward" if in_backward else "forward"):
            self.seen += 1
            if self.n is not None and self.seen == self.n + 1 and self.failed_at is None:
                self.failed_at = str(func)
                raise torch.OutOfMemoryError(f"injected at {func}")
        return func(*args, **(kwargs or {}))


class LimitedMemory(MemoryMeter):
    """A device of so many bytes: more tensors than that raise torch.OutOfMemoryError.

    What was there before does not count: it is the user's batch, of which a device has a part.
    """

    def __init__(self, limit: int, model: nn.Module | None = None) -> None:
        super().__init__(model=model)
        self.limit = limit

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = super()._counted(func, args, kwargs)
        if self.current - self.current_by_category["inputs"] > self.limit:
            del result
            raise torch.OutOfMemoryError(f"{func} passed {self.limit} bytes")
        return result
