"""Gradients on their way to the host: copied out and added there, while the device computes.

A backward hands over each gradient as it is made. It is copied at once into a slot of a small ring
on the device (widened to the dtype of its sum: the host adds float32 six times as fast as it would
widen), so that its own memory is free again in the order in which autograd took it. A stream of its
own copies the slot to a pinned piece of host memory, and one thread adds the piece to the sum;
torch's own threads share that addition. What a window adds first becomes the sum without the host's
help. Both rings are taken once and bound what is under way: without a free slot the device waits
for the link, without a free piece the backward waits for the host.

Everything is added in the order in which it was made, so a sum has the same bits as one on the
device. Where the gradients are on the host already, the thread adds them as they are.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wholebatch.gradients.norm import norm_of_row

__all__ = ["Pipe", "add_on_host", "ring_bytes"]

_WAITING_BYTES = 96 * 2**20
"""Gradients that may wait for the thread where they are on the host already: at most these, and
at most a 32nd of all gradients, so that the peak does not grow with the number of micro-batches."""
_SLOTS = 8
_LARGEST_SLOT = 16 * 2**20
_SMALLEST_SLOT = 64 * 2**10
_PIECES = 48
"""Slots are on the device, pieces of the same size on the host: many, because the link runs ahead
of the host's addition while a backward makes gradients, and rests in the next forward."""
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
class _Part:
    """Some of a gradient: where it lies in its slot and piece, and the part of its sum."""

    begin: int
    end: int
    total: Tensor
    first: bool
    norms: list[Tensor] | None


@dataclass(eq=False, slots=True)
class _Slot:
    """A piece of device memory; free again when what is in it has left."""

    memory: Tensor
    left: torch.cuda.Event | None = None


@dataclass(eq=False, slots=True)
class _Load:
    """Parts of gradients that travel together in one slot."""

    slot: _Slot
    row: Tensor
    stream: torch.cuda.Stream
    filled: int = 0
    parts: list[_Part] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Work:
    """What the thread is to do: wait for `done`, add the parts of `row`, give `piece` back."""

    row: Tensor | None  # None: the parts went to their sums at once
    parts: list[_Part]
    done: torch.cuda.Event | None = None
    piece: Tensor | None = None
    waiting: int = 0


def ring_bytes(nbytes: int) -> int:
    """What the ring on the device takes, for sums of so many bytes."""
    return _SLOTS * _slot_bytes(nbytes)


def _slot_bytes(nbytes: int) -> int:
    return min(_LARGEST_SLOT, max(_SMALLEST_SLOT, nbytes // 256 // 512 * 512))


class _Shared:
    """What the two threads share. The worker holds this and not the Pipe, which can so end it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: deque[_Work | None] = deque()
        self.waiting = 0  # bytes that wait on the host
        self.open = 0
        self.free: list[Tensor] = []
        self.made = 0
        self.failure: BaseException | None = None

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """With `changed` held: wait, but not for a thread that has failed."""
        while condition() and self.failure is None:
            self.changed.wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure


class Pipe:
    """Adds gradients of one device into sums on the host; `nbytes` is the size of all sums."""

    def __init__(
        self, device: torch.device, nbytes: int = 0, *, waiting_bytes: int | None = None
    ) -> None:
        self.device = device
        self._limit = min(_WAITING_BYTES, nbytes // 32) if waiting_bytes is None else waiting_bytes
        self._size = _slot_bytes(nbytes)
        self._shared = _Shared()
        self._thread: threading.Thread | None = None
        self._side: torch.cuda.Stream | None = None
        self._slots: list[_Slot] = []
        self._next = 0
        self._load: _Load | None = None
        self.bytes_out = 0

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
        if self.device.type == "cuda":
            self._put_on_device(gradient, total, first, norms)
            return
        shared = self._shared
        size = gradient.numel() * gradient.element_size()
        part = _Part(0, gradient.numel(), total, first, norms)
        with shared.changed:
            shared.wait_while(lambda: shared.waiting > self._limit)
            shared.waiting += size
            self._hand_over(_Work(gradient, [part], waiting=size))
        self.bytes_out += size

    @torch.no_grad()
    def _put_on_device(
        self, gradient: Tensor, total: Tensor, first: bool, norms: list[Tensor] | None
    ) -> None:
        stream = torch.cuda.current_stream(self.device)
        start = 0
        while start < gradient.numel():
            load = self._load
            if load is not None and (load.row.dtype is not total.dtype or load.stream != stream):
                self.flush()
                load = None
            if load is None:
                load = self._load = self._empty(total.dtype, stream)
            stop = min(gradient.numel(), start + len(load.row) - load.filled)
            end = load.filled + stop - start
            load.row[load.filled : end].copy_(gradient[start:stop])
            load.parts.append(_Part(load.filled, end, total[start:stop], first, norms))
            load.filled, start = end, stop
            if end == len(load.row):
                self.flush()

    def _empty(self, dtype: torch.dtype, stream: torch.cuda.Stream) -> _Load:
        """The next slot; the device waits until what was in it has left."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.left is not None:
            stream.wait_event(slot.left)
        return _Load(slot, slot.memory.view(dtype), stream)

    @torch.no_grad()
    def flush(self) -> None:
        """Send what is in the open slot on its way."""
        load, self._load = self._load, None
        if load is None:
            return
        side = self._side
        assert side is not None
        straight = all(part.first for part in load.parts)
        piece = None if straight else self._piece()
        row = None if piece is None else piece.view(load.row.dtype)[: load.filled]
        side.wait_event(load.stream.record_event())
        with torch.cuda.stream(side):
            if row is not None:
                row.copy_(load.row[: load.filled], non_blocking=True)
            else:
                for part in load.parts:
                    part.total.copy_(load.row[part.begin : part.end], non_blocking=True)
            load.slot.left = side.record_event()
            done = torch.cuda.Event(blocking=True)
            done.record(side)
        self.bytes_out += load.filled * load.row.element_size()
        with self._shared.changed:
            self._hand_over(_Work(row, load.parts, done, piece))

    def _piece(self) -> Tensor:
        """A pinned piece that is free; the backward waits for the host until there is one."""
        shared = self._shared
        with shared.changed:
            if not shared.free and shared.made < _PIECES:
                shared.made += 1
                return torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
            shared.wait_while(lambda: not shared.free)
            return shared.free.pop()

    def _hand_over(self, work: _Work) -> None:
        self._shared.queue.append(work)
        self._shared.open += 1
        self._shared.changed.notify_all()

    def drain(self) -> None:
        """Wait until everything that was handed over is in its sum."""
        self.flush()
        with self._shared.changed:
            self._shared.wait_while(lambda: self._shared.open > 0)

    def forget(self) -> None:
        """Wait like `drain`, for sums that nobody wants any more: a failure is forgotten too."""
        self._load = None
        with self._shared.changed:
            while self._shared.open and self._shared.failure is None:
                self._shared.changed.wait()
            self._shared.failure = None

    def _start(self) -> None:
        if self.device.type == "cuda":
            self._side = torch.cuda.Stream(self.device)
            self._slots = [
                _Slot(torch.empty(self._size, dtype=torch.uint8, device=self.device))
                for _ in range(_SLOTS)
            ]
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
            _add(work)
        except BaseException as error:  # raised again in the thread that trains
            failure = error
        with shared.changed:
            shared.waiting -= work.waiting
            shared.open -= 1
            if work.piece is not None:
                shared.free.append(work.piece)
            if failure is not None:
                shared.failure = failure
                for left in filter(None, shared.queue):
                    shared.waiting -= left.waiting
                    shared.open -= 1
                    shared.free += [left.piece] if left.piece is not None else []
                shared.queue.clear()
            shared.changed.notify_all()
        del work  # not to hold a gradient while there is nothing to do


def _add(work: _Work) -> None:
    if work.done is not None:
        work.done.synchronize()
    for part in work.parts:
        if work.row is not None:
            row = work.row[part.begin : part.end]
            add_on_host(part.total, row, first=part.first, norms=part.norms)
        elif part.norms is not None:
            part.norms.append(norm_of_row(part.total))
