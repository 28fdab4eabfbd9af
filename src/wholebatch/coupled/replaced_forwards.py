"""Forward methods that are replaced on single modules and restored later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["ReplacedForwards"]


class ReplacedForwards:
    """The replaced `forward` methods of single modules. The user's hooks keep working."""

    def __init__(self) -> None:
        self._found: list[tuple[nn.Module, Any]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._found.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def restore(self) -> None:
        while self._found:
            module, forward = self._found.pop()
            if forward is None:
                del module.forward
            else:
                module.forward = forward
