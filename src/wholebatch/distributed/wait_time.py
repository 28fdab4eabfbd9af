"""How long a rank waited for the others: the part of communication that nothing hid."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Waiting"]


class Waiting:
    """Adds up the time of waits, on a CPU by the clock, on CUDA by events on the stream.

    A host does not stop at a CUDA collective, the stream does: the time between an event before
    the wait and one after it is what the device stood still. Events are read when they are over,
    so nothing is waited for here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around one wait."""
        if self._device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        before.record(stream)
        yield
        after.record(stream)
        self._open.append((before, after))

    @property
    def seconds(self) -> float:
        """All waits that are over, so far."""
        while self._open and self._open[0][1].query():
            before, after = self._open.pop(0)
            self._seconds += before.elapsed_time(after) / 1e3
        return self._seconds
