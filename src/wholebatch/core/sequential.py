"""One micro-batch after the other: forward, backward, next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wholebatch.core.forward_state import ForwardState
from wholebatch.core.window import Window

__all__ = ["run_sequential"]


def run_sequential(
    window: Window,
    micros: Sequence[Any],
    micro_step: Callable[[Any], None],
    *,
    first: int = 0,
    places: int | None = None,
    stand_in: Any = None,
    reduces: bool = True,
    before_micro: Callable[[int], None] | None = None,
    after_micro: Callable[[int, int], None] | None = None,
) -> None:
    """Feed the window with `micros[first:]`; the last backward reduces the gradients.

    With `reduces=False` no backward does, and the close reduces them.

    `micro_step(micro)` makes one micro-batch's forward and backward and enters it in the window.
    `places` is the number that all ranks have agreed on: a rank with fewer micro-batches runs its
    last one again (or `stand_in`, if it has none), with weight zero and its buffers put back.
    """
    places = len(micros) if places is None else places
    for index in range(first, places):
        window.closing = reduces and index == places - 1
        if before_micro is not None:
            before_micro(index)
        if index < len(micros):
            micro_step(micros[index])
            window.micro_batch_done()
            if after_micro is not None:
                after_micro(index + 1, len(micros))
        else:
            before = [ForwardState(model) for model in window.target.models]
            window.weightless = True
            micro_step(micros[-1] if micros else stand_in)
            window.weightless = False
            for snapshot in before:
                snapshot.restore()
