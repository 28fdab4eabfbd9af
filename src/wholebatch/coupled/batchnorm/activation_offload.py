"""Paging of sleeping micro-batches to the host: the device holds as much as one would need.

Every storage that a micro-batch creates is a page. When the micro-batch goes to sleep, its pages
are copied to (pinned) host memory. Their device memory is freed as soon as it is needed. An
operation that touches a page later, forward or backward, finds it restored.

A stretch is the part of a pass between two meetings. The pages that each stretch touches are learnt
from the micro-batch that went through it last. They tell which pages to prefetch for the next
micro-batch while another computes, which to free first (those needed last), and which are needed
too soon to be copied at all.

Memory is allocated and freed in the order of the caller's stream, which waits for the copies where
it must. So the device memory needed does not depend on how far the host runs ahead.


---
Pages: storages of a micro-batch that may be on the device or on the host.

---
Memory use of micro-batches, learnt from earlier windows.

---
Host memory for offloaded storages, and the copies to and from it.

On CUDA the memory is pinned and allocated in large slabs that are kept for the next window: pinning
is slow, and sizes repeat from one micro-batch to the next. Copies out and prefetches have a stream
each, so that both directions of the link work while the device computes.


---
The tensor arguments of an operation, and those that it writes to."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from typing import Any, cast

import torch
from torch import Tensor, nn

from wholebatch.coupled.batchnorm.caller_thread_kernels import Execute

__all__ = [
    "Copies",
    "HostPool",
    "Learnt",
    "Page",
    "Paged",
    "Pages",
    "Place",
    "Span",
    "tensors_in",
    "written_by",
]


_aten = torch.ops.aten
# Operations that make a new tensor on the same storage without reading it or checking its bounds.
_NEEDS_NO_DATA = frozenset(
    {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default}
)


class Pages:
    """The pages of all micro-batches of one run.

    `enter` and `leave` are called when a micro-batch wakes and when it goes to sleep, `finish` when
    it is done. All its operations go through `watch`. Pages are the storages on devices of type
    `kind`. Those below `least` bytes stay there, as do gradients of `parameters`. The others use as
    much device memory as the pages of one micro-batch, or as the awake one needs. `peak` is the
    largest number of their bytes on the device at once.
    """

    def __init__(
        self,
        parties: int,
        *,
        pool: HostPool,
        kind: str,
        parameters: Iterable[nn.Parameter] = (),
        learnt: Learnt | None = None,
        least: int = 1 << 16,
    ) -> None:
        self._parties = parties
        self._copies = Copies(pool)
        self._kind = kind
        self._least = least
        self._pages: dict[int, Page] = {}
        self._awake: list[dict[int, Page]] = [{} for _ in range(parties)]
        self._kept: list[dict[int, Page]] = [{} for _ in range(parties)]
        self._by_place: list[dict[Place, Page]] = [{} for _ in range(parties)]
        self._owned = [0] * parties
        self._created = 0
        self._used: set[Place] = set()
        self._stretch = [-1] * parties
        self._party = 0
        self._turn = 0
        self._learnt = Learnt() if learnt is None else learnt
        # Leave room for one page: a new page is counted only after it has been allocated.
        self._room = max(self._learnt.most, self._learnt.busy) - self._learnt.largest
        self._least_room = self._room // 2
        self._may_keep = self._room - self._learnt.busy
        self._kept_bytes = 0
        self._idle = [0, 0, 0]  # Bytes that wait since this turn, the last one, or earlier.
        self._waiting: list[tuple[int, int, int, int, Page]] = []
        self._gradients: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            size = parameter.numel() * parameter.element_size()
            self._gradients.setdefault(size, []).append(parameter)
        self.resident = 0
        self.peak = 0

    def watch(self, execute: Execute) -> Execute:
        """Wrap `execute`: restore its inputs before it runs, and register its outputs after."""

        def watched(func: Any, args: Any, kwargs: Any) -> Any:
            if func in _NEEDS_NO_DATA:
                return func(*args, **kwargs)
            given = {id(t): t for t in tensors_in((args, tuple(kwargs.values())))}
            for tensor in given.values():
                self.touched(tensor)
            out = execute(func, args, kwargs)
            for position, name in written_by(func):
                target = args[position] if position < len(args) else kwargs.get(name)
                for tensor in tensors_in(target):
                    self.written(tensor)
            owned = {tensor.untyped_storage()._cdata for tensor in given.values()}
            for tensor in tensors_in(out):
                if tensor.untyped_storage()._cdata not in owned and not self.known(tensor):
                    self.created(tensor)
            return out

        return watched

    def enter(self, party: int) -> None:
        self._party = party
        self._turn += 1
        self._idle = [0, self._idle[0], self._idle[1] + self._idle[2]]
        self._stretch[party] += 1
        self._created = 0
        self._used = set()
        for key, page in list(self._kept[party].items()):
            self._wake(key, page)
        following = (party + 1) % self._parties
        if following != party:
            self._fetch_ahead(following, self._stretch[following] + 1)

    def leave(self, party: int) -> None:
        """Copy the pages of `party` to the host, except those it needs again at once."""
        stretch = self._stretch[party]
        # Keep the record of the last party: the first may have created what others only reuse.
        self._learnt.learn(stretch, frozenset(self._used))
        going: list[tuple[Page, torch.UntypedStorage]] = []
        sleeping: list[tuple[int, Page]] = []
        for key, page in list(self._awake[party].items()):
            storage = page.storage()
            if storage is None:
                self._forget(key, page)
            elif page.shared or self._is_gradient(key, page):
                self._take_for_good(page)
            elif page.span is None and self._stays(page, stretch):
                page.kept = True
                self._kept_bytes += page.nbytes
                self._kept[party][key] = page
            else:
                sleeping.append((key, page))
                if page.span is None:
                    going.append((page, storage))
        self._awake[party].clear()
        if party == 0:  # The last party also owns what the meetings create.
            self._learnt.most = max(self._learnt.most, self._owned[party])
        spans = self._copies.out([storage for _, storage in going])
        for (page, _), span in zip(going, spans, strict=True):
            page.span = span
        for key, page in sleeping:
            page.waits, page.left = True, self._turn
            self._idle[0] += page.nbytes
            # Pages needed last come first. The key only breaks ties.
            last = -self._learnt.next_use(page.place, stretch)
            heappush(self._waiting, (last, -party, self._turn, key, page))
        self._make_room(0)

    def finish(self, party: int) -> None:
        """Forget the freed pages of a micro-batch that is done."""
        for key, page in list(self._kept[party].items()):
            self._wake(key, page)
        self._awake[party].clear()
        for key, page in list(self._pages.items()):
            if page.owner == party and page.storage() is None:
                self._forget(key, page)

    def close(self) -> Paged:
        """Restore the pages that are still referenced, and forget all of them."""
        self._waiting.clear()
        for key, page in list(self._pages.items()):
            storage = page.storage()
            if storage is not None:
                self._restore(page, storage)
            self._forget(key, page)
        self._copies.join()
        return Paged(self.peak, self._copies.bytes_out, self._copies.bytes_in)

    # Called by the watched `execute`.

    def touched(self, tensor: Tensor) -> None:
        """Make sure that the bytes of `tensor` are on its device."""
        key = tensor.untyped_storage()._cdata
        page = self._pages.get(key)
        if page is None:
            return
        if page.owner != self._party:
            self._share(page)
        elif page.seen != (stretch := self._stretch[page.owner]):
            page.seen = stretch
            self._used.add(page.place)
        if page.waits or page.arriving or not page.resident:
            self._restore(page, tensor.untyped_storage())
            self._wake(key, page)

    def written(self, tensor: Tensor) -> None:
        """Drop the host's copy of `tensor`, which is out of date."""
        page = self._pages.get(tensor.untyped_storage()._cdata)
        if page is not None and page.span is not None:
            self._copies.release(page.span)
            page.span = None

    def created(self, tensor: Tensor) -> None:
        """Register a new storage of the micro-batch that is awake."""
        storage = tensor.untyped_storage()
        key, party = storage._cdata, self._party
        stretch = self._stretch[party]
        place = (stretch, self._created)
        self._created += 1
        nbytes = storage.nbytes()
        if nbytes < self._least or storage.device.type != self._kind:
            return
        weak = cast(int, storage._weak_ref())
        page = Page(weak, nbytes, storage.device, party, place, stretch)
        self._pages[key] = self._awake[party][key] = self._by_place[party][place] = page
        self._owned[party] += nbytes
        self._learnt.largest = max(self._learnt.largest, nbytes)
        self._count(nbytes)
        self._make_room(0)

    def keep(self, tensor: Tensor) -> None:
        """Keep `tensor` on the device, because all micro-batches use it."""
        page = self._pages.get(tensor.untyped_storage()._cdata)
        if page is not None:
            self._share(page)

    def keep_sum(self, tensor: Tensor) -> None:
        """Keep `tensor`, a gradient of all micro-batches, and leave less room for pages.

        Near the end of a pass all gradients exist. A few micro-batches have few pages left by then,
        but many still fill the room, so the peak would grow with the batch. At least half of the
        room stays, so that pages needed soon are not copied.
        """
        page = self._pages.get(tensor.untyped_storage()._cdata)
        if page is not None:
            self._take_for_good(page)

    def known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pages

    # Moving pages.

    def _stays(self, page: Page, stretch: int) -> bool:
        """True if a page without a host copy should stay: it is needed soon, and there is room."""
        soon = self._learnt.next_use(page.place, stretch) == stretch + 1
        return soon and self._kept_bytes + page.nbytes <= self._may_keep

    def _wake(self, key: int, page: Page) -> None:
        """Mark the page as in use again, so that its memory is not freed."""
        self._rouse(key, page)
        self._awake[page.owner][key] = page

    def _rouse(self, key: int, page: Page) -> None:
        if page.waits:
            page.waits = False
            if page.resident:
                self._idle[min(self._turn - page.left, 2)] -= page.nbytes
        if page.kept:
            page.kept = False
            self._kept_bytes -= page.nbytes
            del self._kept[page.owner][key]

    def _take_for_good(self, page: Page) -> None:
        if not page.shared:
            self._share(page)
            less = min(page.nbytes, self._room - self._least_room)
            self._room -= less
            self._may_keep -= less

    def _share(self, page: Page) -> None:
        if not page.shared:
            page.shared = True
            self._owned[page.owner] -= page.nbytes
            if page.resident:
                self.resident -= page.nbytes

    def _restore(self, page: Page, storage: torch.UntypedStorage) -> None:
        if page.arriving:
            assert page.span is not None
            self._copies.arrived(page.span)
            page.arriving = False
        elif not page.resident:
            assert page.span is not None
            self._make_room(page.nbytes)
            storage.resize_(page.nbytes)
            self._copies.back(page.span, storage)
            self._is_back(page)

    def _is_back(self, page: Page) -> None:
        page.resident = True
        if not page.shared:
            self._count(page.nbytes)

    def _fetch_ahead(self, party: int, stretch: int) -> None:
        pages = self._by_place[party]
        coming: list[tuple[Page, Span, torch.UntypedStorage]] = []
        for place in sorted(self._learnt.touched.get(stretch, ())):
            page = pages.get(place)
            if page is None or page.shared or page.arriving or page.kept:
                continue
            storage = page.storage()
            if storage is None:
                continue
            self._wake(storage._cdata, page)
            if not page.resident:
                assert page.span is not None
                coming.append((page, page.span, storage))
        self._make_room(sum(page.nbytes for page, _, _ in coming))
        for page, _, storage in coming:
            storage.resize_(page.nbytes)
            page.arriving = True
            self._is_back(page)
        self._copies.ahead([span for _, span, _ in coming], [storage for _, _, storage in coming])

    def _make_room(self, nbytes: int) -> None:
        """Free the device memory of waiting pages until `nbytes` more fit."""
        if self.resident + nbytes > self._room:
            self._bury(self._party)
        aside = []
        while self.resident + nbytes > self._room and self._waiting:
            entry = heappop(self._waiting)
            page = entry[-1]
            if not page.waits or page.left != entry[2]:
                continue  # It has been woken since.
            if page.left >= self._turn - 1:
                aside.append(entry)  # Its copy may still run, and the compute stream would wait.
                continue
            self._rouse(entry[3], page)
            storage = page.storage()
            if storage is not None:
                self._give_back(page, storage)
        for entry in aside:
            heappush(self._waiting, entry)

    def _give_back(self, page: Page, storage: torch.UntypedStorage) -> None:
        assert page.span is not None
        if page.arriving:  # It was prefetched but not used.
            self._copies.arrived(page.span)
            page.arriving = False
        self._copies.gone(page.span)
        storage.resize_(0)
        page.resident = False
        self.resident -= page.nbytes

    def _bury(self, party: int) -> None:
        """Forget the pages of `party` whose storages have been freed."""
        for key, page in list(self._awake[party].items()):
            if page.storage() is None:
                self._forget(key, page)

    def _forget(self, key: int, page: Page) -> None:
        self._rouse(key, page)
        if page.span is not None:
            self._copies.release(page.span)
            page.span = None
        self._share(page)  # Its bytes are no longer counted.
        page.resident = False
        self._pages.pop(key, None)
        self._awake[page.owner].pop(key, None)
        self._by_place[page.owner].pop(page.place, None)
        torch.UntypedStorage._free_weak_ref(page.weak)

    def _is_gradient(self, key: int, page: Page) -> bool:
        return any(
            parameter.grad is not None and parameter.grad.untyped_storage()._cdata == key
            for parameter in self._gradients.get(page.nbytes, ())
        )

    def _count(self, nbytes: int) -> None:
        self.resident += nbytes
        busy = self.resident - self._idle[2] - self._kept_bytes
        if self.resident > self.peak or busy > self._learnt.busy:
            before = self.resident
            self._bury(self._party)
            self.peak = max(self.peak, self.resident)
            self._learnt.busy = max(self._learnt.busy, busy - (before - self.resident))


@dataclass(frozen=True, slots=True)
class Paged:
    """The bytes of one run: the peak of pages on the device, and the copies out and in."""

    peak: int
    bytes_out: int
    bytes_in: int


@dataclass(eq=False, slots=True)
class Page:
    """One storage, and the location of its bytes."""

    weak: int
    nbytes: int
    device: torch.device
    owner: int
    place: Place
    seen: int  # The stretch in which it was last touched.
    span: Span | None = None
    resident: bool = True
    shared: bool = False  # Used by several micro-batches: it stays on the device.
    arriving: bool = False  # Being prefetched.
    waits: bool = False  # Its micro-batch sleeps and the host has a copy: it may be freed.
    kept: bool = False  # Its micro-batch sleeps, but it is needed too soon to be copied.
    left: int = -1  # The turn in which its micro-batch went to sleep.

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if it has been freed."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return found


Place = tuple[int, int]
"""The identity of a storage: the stretch in which it was created, and its index there."""


@dataclass(eq=False)
class Learnt:
    """The pages that each stretch touches, and the memory that one micro-batch needs.

    A stretch is the part of a micro-batch's run between two meetings.
    """

    touched: dict[int, frozenset[Place]] = field(default_factory=dict)
    most: int = 0
    """The peak of one micro-batch's bytes of pages, on the device or on the host."""
    busy: int = 0
    """The peak of bytes in use or being copied, in either direction."""
    largest: int = 0
    """The bytes of the largest page."""
    _uses: dict[Place, list[int]] = field(default_factory=dict)

    def learn(self, stretch: int, touched: frozenset[Place]) -> None:
        """Record that this stretch touched exactly these places."""
        before = self.touched.get(stretch, frozenset())
        for place in before - touched:
            self._uses[place].remove(stretch)
        for place in touched - before:
            insort(self._uses.setdefault(place, []), stretch)
        self.touched[stretch] = touched

    def next_use(self, place: Place, stretch: int) -> int:
        """Return the first later stretch that touches the place, or `1 << 30` if none is known."""
        uses = self._uses.get(place, ())
        index = bisect_right(uses, stretch)
        return uses[index] if index < len(uses) else 1 << 30


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


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)


@cache
def written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
