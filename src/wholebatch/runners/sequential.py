"""One micro-batch after the other: forward, backward, next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wholebatch.window import Window

__all__ = ["run_sequential"]


def run_sequential(
    window: Window,
    micros: Sequence[Any],
    micro_step: Callable[[Any], None],
    *,
    first: int = 0,
    after_micro: Callable[[int, int], None] | None = None,
) -> None:
    """Feed the window with `micros[first:]`; the last backward reduces the gradients.

    `micro_step(micro)` makes one micro-batch's forward and backward and enters it in the window.
    """
    for index in range(first, len(micros)):
        is_last = index == len(micros) - 1
        window.sync.next_backward_reduces(is_last)
        micro_step(micros[index])
        window.micro_batch_done()
        window.reduced = is_last
        if after_micro is not None:
            after_micro(index + 1, len(micros))
