"""Random numbers of a checkpointed forward, used again in its recomputation.

Activation checkpointing runs a part of the forward again in the backward, where dropout must draw
the same mask. In a graph every drawing operation draws new numbers. So the trace keeps what each
drew, in order, and the recomputation begins at its own place in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from wholebatch.compile.constant_values import draws

aten = torch.ops.aten


class RepeatedDraws:
    """Keeps what is drawn, and gives it again after the generator was set back."""

    def __init__(self) -> None:
        self._draws: list[Any] = []
        """Copies of the results: code may change in place what it drew."""
        self._place = 0

    def drawing_again(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return the body of a checkpoint: when it runs again, it draws what it drew before."""
        start: int | None = None

        def run(*args: Any) -> Any:
            nonlocal start
            after = self._place
            if start is None:
                start = after
                return body(*args)
            self._place = start
            try:
                return body(*args)
            finally:
                self._place = after

        return run

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw, or return what was drawn before; NotImplemented if nothing is drawn."""
        if not draws(func, args, kwargs):
            return NotImplemented
        place, self._place = self._place, self._place + 1
        if place < len(self._draws):
            return _again(func, args, self._draws[place])
        results = func(*args, **kwargs)
        self._draws.append(_copied(results))
        return results


def _again(func: Any, args: Any, results: Any) -> Any:
    """Return the results of the earlier draw, for the same arguments."""
    if func is aten.native_dropout.default:
        # Keep the mask alone: the output is computed again, as the checkpoint wants it.
        _, mask = results
        scale = 0.0 if args[1] == 1 else 1.0 / (1.0 - args[1])
        return args[0] * mask * scale, mask.clone()
    if func._schema.is_mutable:
        return args[0].copy_(results)
    return _copied(results)


def _copied(results: Any) -> Any:
    return map_aggregate(
        results, lambda value: value.clone() if isinstance(value, Tensor) else value
    )
