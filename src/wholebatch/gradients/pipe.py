"""Gradients on their way to the host: copied out and added there, while the device computes.

A backward hands over each gradient as it is made and goes on. One thread copies it through a ring
of pinned pieces, on a stream of its own, and adds it to the sum on the host; torch's own threads
share that addition. The ring is taken once. What still waits on the device is bounded: beyond that
the backward waits for the host.

One thread takes everything in the order in which it was made, so a sum has the same bits as one on
the device.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from wholebatch.gradients.norm import norm_of_row

__all__ = ["Pipe", "add_on_host"]

_WAITING_BYTES = 96 * 2**20
"""Gradients that may wait on the device for the link, beyond the one that is being handed over."""
_PIECE_BYTES = 16 * 2**20
_PIECES = 6
_CAST = 2**19
"""Elements for each thread that are cast before they are added: what its cache holds."""


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
class _Gradient:
    """A gradient that was handed over: flat, and the event after which it is there."""

    flat: Tensor
    total: Tensor
    first: bool
    norms: list[Tensor] | None
    made: torch.cuda.Event | None


@dataclass(eq=False, slots=True)
class _Copy:
    """A piece of the ring with some of a gradient in it, once `done` has happened."""

    done: torch.cuda.Event
    piece: Tensor | None  # None: it was copied to its place in the sum at once
    total: Tensor
    first: bool
    norms: list[Tensor] | None
    frees: _Gradient | None  # the gradient of which this was the last


_Item: TypeAlias = _Gradient | None


class _Shared:
    """What the two threads share. The worker holds this and not the Pipe, which can so end it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: deque[_Item] = deque()
        self.waiting = 0  # bytes on the device
        self.open = 0  # gradients that are not in their sums yet
        self.failure: BaseException | None = None


class Pipe:
    """Adds gradients of one device into sums on the host."""

    def __init__(self, device: torch.device, *, waiting_bytes: int = _WAITING_BYTES) -> None:
        self.device = device
        self._limit = waiting_bytes
        self._shared = _Shared()
        self._thread: threading.Thread | None = None
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
        made = None
        if self.device.type == "cuda":
            made = torch.cuda.current_stream(self.device).record_event()
        shared = self._shared
        size = gradient.numel() * gradient.element_size()
        with shared.changed:
            while shared.waiting > self._limit and shared.failure is None:
                shared.changed.wait()
            self._raise_failure()
            shared.queue.append(_Gradient(gradient, total, first, norms, made))
            shared.waiting += size
            shared.open += 1
            shared.changed.notify_all()
        self.bytes_out += size

    def drain(self) -> None:
        """Wait until everything that was handed over is in its sum."""
        shared = self._shared
        with shared.changed:
            while shared.open and shared.failure is None:
                shared.changed.wait()
            self._raise_failure()

    def forget(self) -> None:
        """Wait like `drain`, for sums that nobody wants any more: a failure is forgotten too."""
        shared = self._shared
        with shared.changed:
            while shared.open and shared.failure is None:
                shared.changed.wait()
            shared.failure = None

    def _raise_failure(self) -> None:
        if self._shared.failure is not None:
            failure, self._shared.failure = self._shared.failure, None
            raise failure

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_work, args=(self._shared, self.device), name="wholebatch-gradients", daemon=True
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


def _work(shared: _Shared, device: torch.device) -> None:
    adder = _DeviceAdder(shared, device) if device.type == "cuda" else _HostAdder(shared)
    while True:
        with shared.changed:
            while not shared.queue and not adder.pending:
                shared.changed.wait()
            item = shared.queue.popleft() if shared.queue and adder.has_room else _NOTHING
        if item is None:
            return
        try:
            if isinstance(item, _Gradient):
                adder.take(item)
            else:
                adder.finish_one()
        except BaseException as failure:  # raised again in the thread that trains
            adder.pending.clear()
            with shared.changed:
                shared.failure = failure
                shared.queue.clear()
                shared.waiting = shared.open = 0
                shared.changed.notify_all()


_NOTHING = object()


def _gone(shared: _Shared, gradient: _Gradient, *, added: bool) -> None:
    with shared.changed:
        if gradient.flat.numel():
            shared.waiting -= gradient.flat.numel() * gradient.flat.element_size()
            gradient.flat = gradient.flat.new_empty(0)
        shared.open -= added
        shared.changed.notify_all()


class _HostAdder:
    """The gradients are on the host already: they are added as they come."""

    has_room = True

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self.pending: deque[_Copy] = deque()

    def take(self, gradient: _Gradient) -> None:
        add_on_host(gradient.total, gradient.flat, first=gradient.first, norms=gradient.norms)
        _gone(self._shared, gradient, added=True)

    def finish_one(self) -> None:
        raise AssertionError("nothing is ever pending")


class _DeviceAdder:
    """Copies through the ring; as many copies are under way as it has pieces."""

    def __init__(self, shared: _Shared, device: torch.device) -> None:
        self._shared = shared
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.pending: deque[_Copy] = deque()
        self._rest: deque[tuple[_Gradient, int]] = deque()
        self._ring = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_PIECES)
        ]
        self._next = 0

    @property
    def has_room(self) -> bool:
        return len(self.pending) < _PIECES and not self._rest

    def take(self, gradient: _Gradient) -> None:
        self._rest.append((gradient, 0))
        self._copy_on()

    def _copy_on(self) -> None:
        """Start copies of what was taken, as far as there are pieces for them."""
        while self._rest and len(self.pending) < _PIECES:
            gradient, start = self._rest.popleft()
            flat, total = gradient.flat, gradient.total
            straight = gradient.first and flat.dtype is total.dtype
            size = flat.numel() if straight else _PIECE_BYTES // flat.element_size()
            stop = min(start + size, flat.numel())
            piece = None
            if not straight:
                ring = self._ring[self._next].view(flat.dtype)
                self._next = (self._next + 1) % _PIECES
                piece = ring[: stop - start]
            with torch.cuda.stream(self._stream), torch.no_grad():
                if start == 0 and gradient.made is not None:
                    self._stream.wait_event(gradient.made)
                target = total if piece is None else piece
                target.copy_(flat[start:stop], non_blocking=True)
                done = torch.cuda.Event(blocking=True)
                done.record(self._stream)
            is_last = stop == flat.numel()
            part = total[start:stop]
            frees = gradient if is_last else None
            self.pending.append(_Copy(done, piece, part, gradient.first, gradient.norms, frees))
            if not is_last:
                self._rest.appendleft((gradient, stop))

    def finish_one(self) -> None:
        """Add the oldest copy to its sum, and let go of a gradient that is copied out."""
        copy = self.pending[0]
        copy.done.synchronize()
        if copy.frees is not None:  # before the addition: the device may go on
            _gone(self._shared, copy.frees, added=False)
        if copy.piece is not None:
            add_on_host(copy.total, copy.piece, first=copy.first, norms=copy.norms)
        elif copy.norms is not None:
            copy.norms.append(norm_of_row(copy.total))
        self.pending.popleft()
        self._copy_on()
        if copy.frees is not None:
            _gone(self._shared, copy.frees, added=True)
