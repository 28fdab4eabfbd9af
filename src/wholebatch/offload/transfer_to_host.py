"""Gradients on their way to sums on the host, beside the backward that makes them.

`CudaTransfer` copies each gradient at once into a slot of a small ring on the device (widened to
the dtype of its sum), so that its own memory is free again in the order in which autograd took it.
Meanwhile that part of the sum comes from the host into the same slot; the device adds, and the new
sum goes back. A sum that is complete may stay on the device. Three streams do this beside the
computation. Without a free slot the device waits for the link. `HostTransfer` serves gradients that
are on the host already. Both add in the order in which gradients were made, as `.grad` would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wholebatch.offload.parameter_buckets import as_real, norm_of_row
from wholebatch.window.forward_state import replaced_attributes

_SLOTS = 4
"""One is filled, one gets its sums, one adds, one leaves."""
_LARGEST = 16 * 2**20
_SMALLEST = 64 * 2**10
_CAST = 2**19
"""Elements for each thread that are added together: what its cache holds."""


def ring_bytes(nbytes: int) -> int:
    """Return the size of the ring on the device, for sums of `nbytes` bytes."""
    return 2 * _SLOTS * _slot_bytes(nbytes)


def _slot_bytes(nbytes: int) -> int:
    return min(_LARGEST, max(_SMALLEST, nbytes // 256 // 512 * 512))


def _check_sizes(gradient: Tensor, total: Tensor) -> None:
    if total.shape != gradient.shape:
        raise ValueError(f"a gradient of {gradient.numel()} for a sum of {total.numel()}")


# CUDA


@dataclass(eq=False, slots=True)
class _Slot:
    """Memory for gradients and for their sums; free again after the event `left`."""

    made: Tensor
    sums: Tensor
    left: torch.cuda.Event | None = None


@dataclass(eq=False, slots=True)
class _SlotPart:
    """A part of a gradient in its slot, and that part of its sum."""

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
    parts: list[_SlotPart] = field(default_factory=list)

    def sum_of(self, part: _SlotPart) -> Tensor:
        """Return the place where the device adds this part."""
        return part.total if part.stays else self.sums[part.begin : part.end]


class CudaTransfer:
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
        self._sent: set[int] = set()  # addresses of sums that are on their way back
        self._drop: Tensor | None = None
        self.fork()  # the slots' memory is free from then on

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
        """Take over a flat gradient: it is added to `total`, or becomes it, soon.

        `norms`, if given, gets the norms of the pieces of the sum, on the device. `stays`, new
        memory of the device, gets the sum in place of `total`, which is then out of date.
        """
        _check_sizes(gradient, total)
        if total.data_ptr() in self._sent:  # twice in one backward
            self.backward_made()
        place = total if stays is None else stays
        self._sent.add(place.data_ptr())
        stream = torch.cuda.current_stream(self.device)
        if stays is not None:  # wait until earlier users of its memory are done
            self._in.wait_event(stream.record_event())
            self._add.wait_event(stream.record_event())
        start = 0
        while start < gradient.numel():
            load = self._load_for(total.dtype, stream)
            stop = min(gradient.numel(), start + len(load.made) - load.filled)
            end = load.filled + stop - start
            load.made[load.filled : end].copy_(gradient[start:stop])
            stay = stays is not None
            part = _SlotPart(load.filled, end, place[start:stop], stay, first, norms)
            if not first:
                with torch.cuda.stream(self._in):
                    load.sum_of(part).copy_(total[start:stop], non_blocking=True)
            load.parts.append(part)
            load.filled, start = end, stop
            if end == len(load.made):
                self.flush()

    def _load_for(self, dtype: torch.dtype, stream: torch.cuda.Stream) -> _Load:
        """Return the open load, or one in the next slot: the device waits until that is free."""
        load = self._load
        if load is not None and (load.dtype is not dtype or load.stream != stream):
            self.flush()
            load = None
        if load is None:
            slot = self._slots[self._next]
            self._next = (self._next + 1) % len(self._slots)
            if slot.left is not None:
                stream.wait_event(slot.left)
                self._in.wait_event(slot.left)
            load = _Load(slot, dtype, stream, slot.made.view(dtype), slot.sums.view(dtype))
            self._load = load
        return load

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
            if self._drop is not None:
                load.sums[: load.filled].masked_fill_(self._drop, 0.0)
            if not any(part.first or part.stays for part in load.parts):
                load.sums[: load.filled].add_(load.made[: load.filled])
            else:
                for part in load.parts:
                    made = load.made[part.begin : part.end]
                    if part.first:
                        load.sum_of(part).copy_(made)
                    else:
                        load.sum_of(part).add_(made)
            for part in load.parts:
                if part.norms is not None:
                    row = load.sum_of(part)
                    part.norms.append(torch.linalg.vector_norm(as_real(row), dtype=torch.float64))
        self._out.wait_event(self._add.record_event())
        with torch.cuda.stream(self._out):
            for part in leave:
                part.total.copy_(load.sum_of(part), non_blocking=True)
        load.slot.left = self._out.record_event()
        self.bytes_out += sum(part.total.nbytes for part in leave)

    def backward_made(self) -> None:
        """End a backward: sums are fetched again only after they have left."""
        self.flush()
        self._in.wait_event(self._out.record_event())
        self._sent.clear()

    @contextmanager
    def from_graph(self, drop: Tensor) -> Iterator[None]:
        """Take gradients from a graph, which may be captured: the streams fork from it and join it.

        `drop` is a flag on the device: if it is set, the sums from before do not count.
        """
        self._restart()
        self.fork()
        self._drop = drop
        try:
            yield
            self.flush()
        finally:
            self._drop = None
            self.join()
            self._restart()

    def _restart(self) -> None:
        """Forget events: those of a capture mean nothing outside, nor the other way round."""
        self._load = None
        self._sent.clear()
        for slot in self._slots:
            slot.left = None

    def fork(self) -> None:
        """Let transfers wait for the work of the device so far."""
        for stream in (self._in, self._add, self._out):
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """Let the device wait for the transfers so far."""
        for stream in (self._in, self._add, self._out):
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def drain(self) -> None:
        """Wait until everything that was handed over is in its sum."""
        self.backward_made()
        self._out.synchronize()  # it runs after the work of the other two


# CPU


@torch.no_grad()
def add_on_host(
    total: Tensor, part: Tensor, *, first: bool, norms: list[Tensor] | None = None
) -> None:
    """Compute `total += part`, or `total = part`, for flat host tensors; `part` may be 16-bit.

    If `norms` is given, the norms of the pieces of the new `total` are appended to it.
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


class HostTransfer:
    """Adds gradients that are on the host already."""

    def __init__(self) -> None:
        self.bytes_out = 0
        self._drop: Tensor | None = None

    def from_graph(self, drop: Tensor) -> AbstractContextManager[None]:
        """Take gradients from a graph; if `drop` is set, the sums from before do not count."""
        return replaced_attributes(self, _drop=drop)

    def put(self, gradient: Tensor, total: Tensor, *, stays: object = None, **how: Any) -> None:
        """Add a flat gradient to `total`, or let it become that; see `CudaTransfer.put`."""
        assert stays is None
        _check_sizes(gradient, total)
        if self._drop is not None:
            how["first"] = bool(self._drop)
        add_on_host(total, gradient, **how)
        self.bytes_out += gradient.nbytes

    def backward_made(self) -> None:
        """Do nothing, as in `drain`: nothing is under way."""

    drain = backward_made
