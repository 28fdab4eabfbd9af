"""Gradients of a CUDA device on their way to sums on the host, added by the device.

A backward hands over each gradient as it is made. It is copied at once into a slot of a small ring
(widened to the dtype of its sum), so that its own memory is free again in the order in which
autograd took it. Meanwhile that part of the sum comes from the host into the same slot; the device
adds, and the new sum goes back. The link works in both directions at once, and the host adds
nothing: it would have to read and write more memory for that than the link brings. What a window
adds first becomes the sum without coming first. A sum that is complete then may stay on the device.

Three streams do this beside the computation, in the order in which gradients were made, so a sum
has the same bits as one that is never moved. The ring is taken once and bounds what is under way:
without a free slot the device waits for the link.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wholebatch.offload.host_sums import norm_of_row

__all__ = ["Link", "Pipe", "add_on_host", "ring_bytes"]

_SLOTS = 4
"""One is filled, one gets its sums, one adds, one leaves."""
_LARGEST = 16 * 2**20
_SMALLEST = 64 * 2**10


def ring_bytes(nbytes: int) -> int:
    """What the ring on the device takes, for sums of so many bytes."""
    return 2 * _SLOTS * _slot_bytes(nbytes)


def _slot_bytes(nbytes: int) -> int:
    return min(_LARGEST, max(_SMALLEST, nbytes // 256 // 512 * 512))


@dataclass(eq=False, slots=True)
class _Slot:
    """Memory for gradients and for their sums; free again when the sums have left."""

    made: Tensor
    sums: Tensor
    left: torch.cuda.Event | None = None


@dataclass(eq=False, slots=True)
class _Part:
    """Some of a gradient: where it lies in its slot, and the part of its sum.

    That is on the host, and comes into the slot; or it has come to where it stays.
    """

    begin: int
    end: int
    total: Tensor
    stays: bool
    first: bool
    norms: list[Tensor] | None


@dataclass(eq=False, slots=True)
class _Load:
    """Parts of gradients that travel together in one slot."""

    slot: _Slot
    dtype: torch.dtype
    stream: torch.cuda.Stream
    made: Tensor
    sums: Tensor
    filled: int = 0
    parts: list[_Part] = field(default_factory=list)


class Link:
    """Adds gradients of one CUDA device into pinned sums; `nbytes` is the size of all sums."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.bytes_out = 0
        shape = (_SLOTS, 2, _slot_bytes(nbytes))
        memory = torch.empty(shape, dtype=torch.uint8, device=device)
        self._slots = [_Slot(made, sums) for made, sums in memory]
        self._next = 0
        self._load: _Load | None = None
        self._in, self._add, self._out = (torch.cuda.Stream(device) for _ in range(3))
        for stream in (self._in, self._add, self._out):
            stream.wait_stream(torch.cuda.current_stream(device))  # the slots' memory is ours
        self._sent: set[int] = set()  # sums that are on their way back, by their place

    @torch.no_grad()
    def put(
        self,
        gradient: Tensor,
        total: Tensor,
        *,
        first: bool,
        norms: list[Tensor] | None = None,
        stays: Tensor | None = None,
    ) -> None:
        """Take a flat gradient over: it is added to `total`, or becomes it, soon.

        `norms`, if given, gets the norms of the pieces of the sum, on the device. `stays`, new
        memory of the device, gets the sum in the place of `total`, which is not true any more.
        """
        if total.shape != gradient.shape:
            raise ValueError(f"a gradient of {gradient.numel()} for a sum of {total.numel()}")
        if total.data_ptr() in self._sent:  # twice in one backward
            self.backward_made()
        self._sent.add((total if stays is None else stays).data_ptr())
        stream = torch.cuda.current_stream(self.device)
        if stays is not None:
            self._in.wait_event(stream.record_event())  # what its memory was used for is over
            self._add.wait_event(stream.record_event())
        start = 0
        while start < gradient.numel():
            load = self._load
            if load is not None and (load.dtype is not total.dtype or load.stream != stream):
                self.flush()
                load = None
            if load is None:
                load = self._load = self._empty(total.dtype, stream)
            stop = min(gradient.numel(), start + len(load.made) - load.filled)
            end = load.filled + stop - start
            load.made[load.filled : end].copy_(gradient[start:stop])
            place = total if stays is None else stays
            if not first:
                to = load.sums[load.filled : end] if stays is None else stays[start:stop]
                with torch.cuda.stream(self._in):
                    to.copy_(total[start:stop], non_blocking=True)
            stay = stays is not None
            load.parts.append(_Part(load.filled, end, place[start:stop], stay, first, norms))
            load.filled, start = end, stop
            if end == len(load.made):
                self.flush()

    def _empty(self, dtype: torch.dtype, stream: torch.cuda.Stream) -> _Load:
        """The next slot; the device waits until what was in it has left."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.left is not None:
            stream.wait_event(slot.left)
            self._in.wait_event(slot.left)
        return _Load(slot, dtype, stream, slot.made.view(dtype), slot.sums.view(dtype))

    @torch.no_grad()
    def flush(self) -> None:
        """Add what is in the open slot, and send it on its way."""
        load, self._load = self._load, None
        if load is None:
            return
        self._add.wait_event(load.stream.record_event())
        self._add.wait_event(self._in.record_event())
        leave = [part for part in load.parts if not part.stays]
        with torch.cuda.stream(self._add):
            if not any(part.first or part.stays for part in load.parts):
                load.sums[: load.filled].add_(load.made[: load.filled])
            else:
                for part in load.parts:
                    made = load.made[part.begin : part.end]
                    row = part.total if part.stays else load.sums[part.begin : part.end]
                    if part.first:
                        row.copy_(made)
                    else:
                        row.add_(made)
            for part in load.parts:
                if part.norms is not None:
                    row = part.total if part.stays else load.sums[part.begin : part.end]
                    part.norms.append(torch.linalg.vector_norm(row, dtype=torch.float64))
        self._out.wait_event(self._add.record_event())
        with torch.cuda.stream(self._out):
            for part in leave:
                part.total.copy_(load.sums[part.begin : part.end], non_blocking=True)
        load.slot.left = self._out.record_event()
        self.bytes_out += sum(part.total.nbytes for part in leave)

    def backward_made(self) -> None:
        """All gradients of a backward are there: sums come again only after they have left."""
        self.flush()
        self._in.wait_event(self._out.record_event())
        self._sent.clear()

    def drain(self) -> None:
        """Wait until everything that was handed over is in its sum."""
        self.backward_made()
        self._out.synchronize()  # it comes after what the others have been given

    def forget(self) -> None:
        """Wait like `drain`, for sums that nobody wants any more."""
        self._load = None
        self._sent.clear()
        for stream in (self._in, self._add, self._out):
            stream.synchronize()


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
