"""Gradient hooks of the user's: once per window, on the whole gradient.

A hook on a parameter (`parameter.register_hook`) may clip, mask or add noise. For the undivided
batch it runs once, on the whole gradient; run on every micro-batch it would be another function
unless it is linear. So a window takes the hooks off, and runs them at its close.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

__all__ = ["DeferredHooks"]


class DeferredHooks:
    """The hooks that were taken off the parameters of an open window."""

    def __init__(self) -> None:
        self._taken: list[tuple[nn.Parameter, Mapping[int, Any]]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            hooks = parameter._backward_hooks
            if hooks:
                parameter._backward_hooks = None
                self._taken.append((parameter, hooks))

    def run(
        self, lent: Callable[[nn.Parameter], AbstractContextManager[None]] | None = None
    ) -> None:
        """Each hook in its order, on the complete normalised gradient, as autograd would.

        Within `lent(parameter)` a gradient that is kept elsewhere is in the parameter's `.grad`.
        """
        for parameter, hooks in self._taken:
            with nullcontext() if lent is None else lent(parameter):
                for hook in list(hooks.values()):
                    if parameter.grad is None:
                        break
                    replaced = hook(parameter.grad)
                    if replaced is not None:
                        parameter.grad = replaced

    def give_back(self) -> None:
        for parameter, hooks in self._taken:
            parameter._backward_hooks = hooks  # type: ignore[assignment]
        self._taken.clear()
