"""Host memory for offloaded storages, and the copies to and from it.

On CUDA the memory is pinned and allocated in large slabs that are kept for the next window: pinning
is slow, and sizes repeat from one micro-batch to the next. Copies out and prefetches have a stream
each, so that both directions of the link work while the device computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Copies", "HostPool", "Span"]

_PAGE = 4096


@dataclass(eq=False, slots=True)
class Span:
    """A piece of host memory, and the events of the last copies to and from it."""

    bytes: Tensor
    size: int
    written: torch.cuda.Event | None = None
    read: torch.cuda.Event | None = None


class HostPool:
    """A pool of reusable pieces of host memory; `held` and `used` count bytes."""

    def __init__(self, *, pinned: bool, slab: int = 1 << 28) -> None:
        self._pinned = pinned
        self._slab = slab if pinned else 0
        self._free: dict[int, list[Span]] = {}
        self._rest: Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.held = 0
        self.used = 0

    def take(self, nbytes: int) -> Span:
        size = -(-nbytes // _PAGE) * _PAGE
        self.used += size
        free = self._free.get(size)
        if free:
            span = free.pop()
            span.bytes = span.bytes[:nbytes] if len(span.bytes) != nbytes else span.bytes
            return span
        return Span(self._new(size)[:nbytes], size)

    def give(self, span: Span) -> None:
        self.used -= span.size
        if self._pinned:
            self._free.setdefault(span.size, []).append(span)
        else:
            self.held -= span.size

    def forget_copies(self) -> None:
        """Drop the events of free pieces, once all copies to and from them are done."""
        for spans in self._free.values():
            for span in spans:
                span.written = span.read = None

    def _new(self, size: int) -> Tensor:
        if size > len(self._rest):
            fresh = max(size, self._slab)
            rest = torch.empty(fresh, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
            self.held += fresh
            if fresh == size:
                return rest
            self._rest = rest
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece


class Copies:
    """Copies between storages and spans, ordered against the compute stream."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._out: dict[torch.device, torch.cuda.Stream] = {}
        self._in: dict[torch.device, torch.cuda.Stream] = {}
        self.bytes_out = 0
        self.bytes_in = 0

    def out(self, storages: Sequence[torch.UntypedStorage]) -> list[Span]:
        """Start copies to the host and return their spans; keep the storages until `gone`."""
        with torch._C._DisableTorchDispatch():
            spans = [self._pool.take(storage.nbytes()) for storage in storages]
            for device, indices in _by_device(storages).items():
                stream = self._side(self._out, device)
                for index in indices:
                    if stream is not None and (read := spans[index].read) is not None:
                        stream.wait_event(read)
                    with torch.cuda.stream(stream):
                        spans[index].bytes.copy_(_bytes(storages[index]), non_blocking=True)
                if stream is not None:
                    done = stream.record_event()
                    for index in indices:
                        spans[index].written = done
        self.bytes_out += sum(storage.nbytes() for storage in storages)
        return spans

    def gone(self, span: Span) -> None:
        """Make the compute stream wait for the copy out, so that device memory can be reused."""
        if span.written is not None:
            torch.cuda.current_stream().wait_event(span.written)

    def back(self, span: Span, storage: torch.UntypedStorage) -> None:
        """Copy to the device on the compute stream."""
        self.gone(span)
        with torch._C._DisableTorchDispatch():
            _bytes(storage).copy_(span.bytes, non_blocking=True)
        if storage.device.type == "cuda":
            span.read = torch.cuda.current_stream().record_event()
        self.bytes_in += storage.nbytes()

    def ahead(self, spans: Sequence[Span], storages: Sequence[torch.UntypedStorage]) -> None:
        """Start copies to the device; call `arrived` before computing with the data."""
        with torch._C._DisableTorchDispatch():
            for device, indices in _by_device(storages).items():
                stream = self._side(self._in, device)
                for index in indices:
                    span = spans[index]
                    if stream is not None and span.written is not None:
                        stream.wait_event(span.written)
                    with torch.cuda.stream(stream):
                        _bytes(storages[index]).copy_(span.bytes, non_blocking=True)
                if stream is not None:
                    done = stream.record_event()
                    for index in indices:
                        spans[index].read = done
        self.bytes_in += sum(storage.nbytes() for storage in storages)

    def arrived(self, span: Span) -> None:
        if span.read is not None:
            torch.cuda.current_stream().wait_event(span.read)

    def release(self, span: Span) -> None:
        self._pool.give(span)

    def join(self) -> None:
        """Make the compute stream wait for all copies."""
        for device, stream in (*self._out.items(), *self._in.items()):
            torch.cuda.current_stream(device).wait_stream(stream)

    def _side(
        self, streams: dict[torch.device, torch.cuda.Stream], device: torch.device
    ) -> torch.cuda.Stream | None:
        """Return a side stream that waits for the work queued on the compute stream so far."""
        if device.type != "cuda":
            return None
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        streams[device].wait_stream(torch.cuda.current_stream(device))
        return streams[device]


def _by_device(storages: Sequence[torch.UntypedStorage]) -> dict[torch.device, list[int]]:
    found: dict[torch.device, list[int]] = {}
    for index, storage in enumerate(storages):
        found.setdefault(storage.device, []).append(index)
    return found


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
