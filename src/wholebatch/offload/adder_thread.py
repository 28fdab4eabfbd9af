"""Gradients that are on the host are added to their sums by a thread of its own.

A backward hands over each gradient as it is made and goes on; torch's own threads share the
addition. Everything is added in the order in which it was made, so a sum has the same bits as one
in `.grad`. (`link` does the same for a CUDA device.)
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wholebatch.offload.host_norm import norm_of_row

__all__ = ["Pipe", "add_on_host"]

_WAITING_BYTES = 96 * 2**20
"""Gradients that may wait for the thread: at most these, and at most a 32nd of all gradients, so
that the peak does not grow with the number of micro-batches."""
_CAST = 2**19
"""Elements for each thread that are worked on together: what its cache holds."""


@torch.no_grad()
def add_on_host(
    total: Tensor, part: Tensor, *, first: bool, norms: list[Tensor] | None = None
) -> None:
    """`total += part`, or `total = part`, for flat tensors on the host; `part` may be 16-bit.

    Where `norms` is given, the norms of the pieces of the new `total` are added to it.
    """
    # Piece by piece: torch would write a widened copy of all of it to memory first, and the norm
    # finds in the cache what has just been added.
    step = _CAST * torch.get_num_threads()
    wide = None
    if not first and total.dtype is not part.dtype:
        wide = torch.empty(min(step, part.numel()), dtype=total.dtype)
    for start in range(0, part.numel(), step):
        piece, sum_ = part[start : start + step], total[start : start + step]
        if first:
            sum_.copy_(piece)
        else:
            sum_.add_(piece if wide is None else wide[: piece.numel()].copy_(piece))
        if norms is not None:
            norms.append(norm_of_row(sum_))


@dataclass(eq=False, slots=True)
class _Work:
    """What the thread is to add, and where."""

    gradient: Tensor
    total: Tensor
    first: bool
    norms: list[Tensor] | None
    size: int


class _Shared:
    """What the two threads share. The worker holds this and not the Pipe, which can so end it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: deque[_Work | None] = deque()
        self.waiting = 0  # bytes
        self.open = 0
        self.failure: BaseException | None = None

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """With `changed` held: wait, but not for a thread that has failed."""
        while condition() and self.failure is None:
            self.changed.wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure


class Pipe:
    """Adds gradients into sums beside the backward; `nbytes` is the size of all sums."""

    def __init__(self, nbytes: int = 0, *, waiting_bytes: int | None = None) -> None:
        self.bytes_out = 0
        self._limit = min(_WAITING_BYTES, nbytes // 32) if waiting_bytes is None else waiting_bytes
        self._shared = _Shared()
        self._thread: threading.Thread | None = None

    def put(
        self, gradient: Tensor, total: Tensor, *, first: bool, norms: list[Tensor] | None = None
    ) -> None:
        """Take a flat gradient over: it is added to `total`, or becomes it, soon.

        `norms`, if given, gets the norms of the pieces of the sum.
        """
        if total.shape != gradient.shape:
            raise ValueError(f"a gradient of {gradient.numel()} for a sum of {total.numel()}")
        if self._thread is None:
            self._start()
        shared = self._shared
        size = gradient.numel() * gradient.element_size()
        with shared.changed:
            shared.wait_while(lambda: shared.waiting > self._limit)
            shared.waiting += size
            shared.queue.append(_Work(gradient, total, first, norms, size))
            shared.open += 1
            shared.changed.notify_all()
        self.bytes_out += size

    def backward_made(self) -> None:
        """All gradients of a backward are there; nothing waits for more of them."""
        return

    def drain(self) -> None:
        """Wait until everything that was handed over is in its sum."""
        with self._shared.changed:
            self._shared.wait_while(lambda: self._shared.open > 0)

    def forget(self) -> None:
        """Wait like `drain`, for sums that nobody wants any more: a failure is forgotten too."""
        with self._shared.changed:
            while self._shared.open and self._shared.failure is None:
                self._shared.changed.wait()
            self._shared.failure = None

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_work, args=(self._shared,), name="wholebatch-gradients", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _end, self._shared, self._thread)


def _end(shared: _Shared, thread: threading.Thread) -> None:
    """The pipe, or the interpreter, goes: no thread may be inside torch by then."""
    with shared.changed:
        shared.queue.append(None)
        shared.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(timeout=10.0)


def _work(shared: _Shared) -> None:
    while True:
        with shared.changed:
            while not shared.queue:
                shared.changed.wait()
            work = shared.queue.popleft()
        if work is None:
            return
        failure: BaseException | None = None
        try:
            add_on_host(work.total, work.gradient, first=work.first, norms=work.norms)
        except BaseException as error:  # raised again in the thread that trains
            failure = error
        with shared.changed:
            shared.waiting -= work.size
            shared.open -= 1
            if failure is not None:
                shared.failure = failure
                for left in filter(None, shared.queue):
                    shared.waiting -= left.size
                    shared.open -= 1
                shared.queue.clear()
            shared.changed.notify_all()
        del work  # not to hold a gradient while there is nothing to do
