"""One micro-batch after the other: forward, backward, next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wholebatch.loss import Loss, Terms
from wholebatch.window import Window

__all__ = ["run_sequential"]


def run_sequential(
    window: Window,
    micros: Sequence[Any],
    forward: Callable[[Any], Loss | Terms],
    *,
    first: int = 0,
    after_micro: Callable[[int, int], None] | None = None,
) -> None:
    """Feed the window with `micros[first:]`; the last backward reduces the gradients."""
    for index in range(first, len(micros)):
        is_last = index == len(micros) - 1
        window.sync.next_backward_reduces(is_last)
        window.add_loss(forward(micros[index]))
        window.micro_batch_done()
        window.reduced = is_last
        if after_micro is not None:
            after_micro(index + 1, len(micros))
