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

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Link", "ring_bytes"]

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
