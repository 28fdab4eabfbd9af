"""Activations of sleeping micro-batches on the host: the device holds as much as one would need.

Every storage that a micro-batch creates is a page. When the micro-batch goes to sleep, its pages
are copied to (pinned) host memory. Their device memory is freed as soon as it is needed. An
operation that touches a page later, forward or backward, finds it restored.

A stretch is the part of a pass between two meetings. The pages that each stretch touches are learnt
from the micro-batch that went through it last. They tell which pages to prefetch for the next
micro-batch while another computes, which to free first (those needed last), and which are needed
too soon to be copied at all.

Memory is allocated and freed in the order of the caller's stream, which waits for the copies where
it must. So the device memory needed does not depend on how far the host runs ahead. Copies out and
prefetches have a stream each, so that both directions of the link work while the device computes.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.compile.fusion import written_arguments

_aten = torch.ops.aten
# Operations that make a new tensor on the same storage without reading it or checking its bounds.
_NEEDS_NO_DATA = frozenset(
    {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default}
)
_HOST_PAGE = 4096

Place = tuple[int, int]
"""The identity of a page: the stretch in which it was created, and its index there."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes of one run: the peak of pages on the device, and the copies out and in."""

    peak: int
    bytes_out: int
    bytes_in: int


@dataclass(eq=False)
class LearnedUse:
    """The pages that each stretch touches, and the memory that one micro-batch needs."""

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


@dataclass(eq=False, slots=True)
class _Span:
    """A piece of host memory, its `bytes` in use, and the events of the last copies."""

    whole: Tensor
    bytes: Tensor
    written: torch.cuda.Event | None = None
    read: torch.cuda.Event | None = None


class HostPool:
    """A pool of reusable pieces of host memory; `held` and `used` count bytes.

    On CUDA the memory is pinned and allocated in large slabs that are kept for the next window:
    pinning is slow, and sizes repeat from one micro-batch to the next.
    """

    def __init__(self, *, pinned: bool, slab: int = 1 << 28) -> None:
        self._pinned = pinned
        self._slab = slab if pinned else 0
        self._free: dict[int, list[_Span]] = {}
        self._rest: Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.held = 0
        self.used = 0

    def take(self, nbytes: int) -> _Span:
        """Return a piece of that many bytes."""
        size = -(-nbytes // _HOST_PAGE) * _HOST_PAGE
        self.used += size
        free = self._free.get(size)
        with torch._C._DisableTorchDispatch():  # Host memory is no page of the micro-batch.
            if not free:
                whole = self._new(size)
                return _Span(whole, whole[:nbytes])
            span = free.pop()
            if len(span.bytes) != nbytes:
                span.bytes = span.whole[:nbytes]
            return span

    def give(self, span: _Span) -> None:
        """Take a piece back, to use it again if it is pinned."""
        size = len(span.whole)
        self.used -= size
        if self._pinned:
            self._free.setdefault(size, []).append(span)
        else:
            self.held -= size

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


class _HostCopies:
    """Copies between storages and host memory, ordered against the compute stream."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}
        self.bytes_out = 0
        self.bytes_in = 0

    def start(
        self, spans: Sequence[_Span], storages: Sequence[UntypedStorage], *, out: bool
    ) -> None:
        """Start copies to the host (`out`), or to the device, on a stream of their own.

        Keep a storage until `wait(span.written)`, and do not read it before `wait(span.read)`.
        """
        devices: dict[torch.device, list[tuple[_Span, UntypedStorage]]] = {}
        for span, storage in zip(spans, storages, strict=True):
            devices.setdefault(storage.device, []).append((span, storage))
        for device, pairs in devices.items():
            stream = self._side_stream(device, out=out)
            for span, storage in pairs:
                before = span.read if out else span.written
                if stream is not None and before is not None:
                    stream.wait_event(before)
                with torch.cuda.stream(stream):
                    _copy(span, storage, out=out)
            if stream is not None:
                done = stream.record_event()
                for span, _ in pairs:
                    if out:
                        span.written = done
                    else:
                        span.read = done
        nbytes = sum(storage.nbytes() for storage in storages)
        if out:
            self.bytes_out += nbytes
        else:
            self.bytes_in += nbytes

    def back(self, span: _Span, storage: UntypedStorage) -> None:
        """Copy to the device on the compute stream."""
        self.wait(span.written)
        _copy(span, storage, out=False)
        if storage.device.type == "cuda":
            span.read = torch.cuda.current_stream().record_event()
        self.bytes_in += storage.nbytes()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for a copy."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait_for_all(self) -> None:
        """Make the compute stream wait for all copies."""
        for (device, _), stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _side_stream(self, device: torch.device, *, out: bool) -> torch.cuda.Stream | None:
        """Return a stream that waits for the work queued on the compute stream so far."""
        if device.type != "cuda":
            return None
        if (device, out) not in self._streams:
            self._streams[device, out] = torch.cuda.Stream(device)
        stream = self._streams[device, out]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def _copy(span: _Span, storage: UntypedStorage, *, out: bool) -> None:
    with torch._C._DisableTorchDispatch():
        on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        target, source = (span.bytes, on_device) if out else (on_device, span.bytes)
        target.copy_(source, non_blocking=True)


@dataclass(eq=False, slots=True)
class _ActivationPage:
    """One storage, and the location of its bytes."""

    key: int
    weak: int
    nbytes: int
    owner: int
    place: Place
    seen: int  # The stretch in which it was last touched.
    span: _Span | None = None
    resident: bool = True
    shared: bool = False  # Used by several micro-batches: it stays on the device.
    arriving: bool = False  # Being prefetched.
    waits: bool = False  # Its micro-batch sleeps and the host has a copy: it may be freed.
    kept: bool = False  # Its micro-batch sleeps, but it is needed too soon to be copied.
    left: int = -1  # The turn in which its micro-batch went to sleep.

    def storage(self) -> UntypedStorage | None:
        """Return the storage, or None if it has been freed."""
        found: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(self.weak)
        return found


class ActivationPages:
    """The pages of all micro-batches of one run.

    `enter` and `leave` are called when a micro-batch wakes and when it goes to sleep, `finish` when
    it is done. All its operations run within `WatchedOperations`. Pages are the storages on devices
    of type `kind`. Those below `least` bytes stay there, as do gradients of `parameters`. The
    others use as much device memory as the pages of one micro-batch, or as the awake one needs.
    """

    def __init__(
        self,
        parties: int,
        *,
        pool: HostPool,
        kind: str,
        parameters: Iterable[nn.Parameter],
        learned: LearnedUse,
        least: int,
    ) -> None:
        self._parties = parties
        self._pool = pool
        self._copies = _HostCopies()
        self._kind = kind
        self._least = least
        self._pages: dict[int, _ActivationPage] = {}
        # The pages in use of each party; of a sleeping one, those that stay or are prefetched.
        self._awake: list[dict[int, _ActivationPage]] = [{} for _ in range(parties)]
        self._by_place: list[dict[Place, _ActivationPage]] = [{} for _ in range(parties)]
        self._owned = [0] * parties
        self._created = 0
        self._used: set[Place] = set()
        self._stretch = [-1] * parties
        self._party = 0
        self._turn = 0
        self._learned = learned
        # Leave room for one page: a new page is counted only after it has been allocated.
        self._room = max(learned.most, learned.busy) - learned.largest
        self._least_room = self._room // 2
        self._may_keep = self._room - learned.busy
        self._kept_bytes = 0
        self._idle = [0, 0, 0]  # Bytes that wait since this turn, the last one, or earlier.
        self._waiting: list[tuple[int, int, int, int, _ActivationPage]] = []
        self._gradients: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            size = parameter.numel() * parameter.element_size()
            self._gradients.setdefault(size, []).append(parameter)
        self._resident = 0
        self._peak = 0

    def enter(self, party: int) -> None:
        """Wake a micro-batch, and prefetch the pages of the next one."""
        self._party = party
        self._turn += 1
        self._idle = [0, self._idle[0], self._idle[1] + self._idle[2]]
        self._stretch[party] += 1
        self._created = 0
        self._used = set()
        for page in self._awake[party].values():
            self._end_sleep(page)
        following = (party + 1) % self._parties
        if following != party:
            self._prefetch(following, self._stretch[following] + 1)

    def leave(self, party: int) -> None:
        """Copy the pages of `party` to the host, except those it needs again at once."""
        stretch = self._stretch[party]
        # Keep the record of the last party: the first may have created what others only reuse.
        self._learned.learn(stretch, frozenset(self._used))
        going: list[tuple[_ActivationPage, UntypedStorage]] = []
        sleeping: list[_ActivationPage] = []
        staying: dict[int, _ActivationPage] = {}
        for page in list(self._awake[party].values()):
            storage = page.storage()
            if storage is None:
                self._forget(page)
            elif page.shared or self._is_gradient(page):
                self._keep_for_good(page)
            elif page.span is None and self._stays(page, stretch):
                page.kept = True
                self._kept_bytes += page.nbytes
                staying[page.key] = page
            else:
                sleeping.append(page)
                if page.span is None:
                    going.append((page, storage))
        self._awake[party] = staying
        if party == 0:  # The last party also owns what the meetings create.
            self._learned.most = max(self._learned.most, self._owned[party])
        spans = [self._pool.take(page.nbytes) for page, _ in going]
        self._copies.start(spans, [storage for _, storage in going], out=True)
        for (page, _), span in zip(going, spans, strict=True):
            page.span = span
        for page in sleeping:
            page.waits, page.left = True, self._turn
            self._idle[0] += page.nbytes
            # Pages needed last come first. The key only breaks ties.
            last = -self._learned.next_use(page.place, stretch)
            heappush(self._waiting, (last, -party, self._turn, page.key, page))
        self._make_room(0)

    def finish(self, party: int) -> None:
        """Forget the freed pages of a micro-batch that is done."""
        self._awake[party].clear()
        self._forget_freed(page for page in self._pages.values() if page.owner == party)

    def close(self) -> Traffic:
        """Restore the pages that are still referenced, and forget all of them."""
        self._waiting.clear()
        for page in list(self._pages.values()):
            storage = page.storage()
            if storage is not None:
                self._restore(page, storage)
            self._forget(page)
        self._copies.wait_for_all()
        return Traffic(self._peak, self._copies.bytes_out, self._copies.bytes_in)

    # Called by `WatchedOperations` and by those who make tensors for all micro-batches.

    def touched(self, tensor: Tensor) -> None:
        """Make sure that the bytes of `tensor` are on its device."""
        page = self._page(tensor)
        if page is None:
            return
        if page.owner != self._party:
            self._share(page)
        elif page.seen != (stretch := self._stretch[page.owner]):
            page.seen = stretch
            self._used.add(page.place)
        if page.waits or page.arriving or not page.resident:
            self._restore(page, tensor.untyped_storage())
            self._wake(page)

    def written(self, tensor: Tensor) -> None:
        """Drop the host's copy of `tensor`, which is out of date."""
        page = self._page(tensor)
        if page is not None:
            self._drop_host_copy(page)

    def created(self, tensor: Tensor) -> None:
        """Register a new storage of the micro-batch that is awake."""
        if self._page(tensor) is not None:
            return
        storage, party = tensor.untyped_storage(), self._party
        stretch = self._stretch[party]
        place = (stretch, self._created)
        self._created += 1
        nbytes = storage.nbytes()
        if nbytes < self._least or storage.device.type != self._kind:
            return
        key, weak = storage_key(tensor), cast(int, storage._weak_ref())
        page = _ActivationPage(key, weak, nbytes, party, place, stretch)
        self._pages[key] = self._awake[party][key] = self._by_place[party][place] = page
        self._owned[party] += nbytes
        self._learned.largest = max(self._learned.largest, nbytes)
        self._count(nbytes)
        self._make_room(0)

    def keep(self, tensor: Tensor) -> None:
        """Keep `tensor` on the device, because all micro-batches use it."""
        page = self._page(tensor)
        if page is not None:
            self._share(page)

    def keep_sum(self, tensor: Tensor) -> None:
        """Keep `tensor`, a gradient of all micro-batches, and leave less room for pages.

        Near the end of a pass all gradients exist. A few micro-batches have few pages left by then,
        but many still fill the room, so the peak would grow with the batch. At least half of the
        room stays, so that pages needed soon are not copied.
        """
        page = self._page(tensor)
        if page is not None:
            self._keep_for_good(page)

    def _page(self, tensor: Tensor) -> _ActivationPage | None:
        return self._pages.get(storage_key(tensor))

    # Moving pages.

    def _stays(self, page: _ActivationPage, stretch: int) -> bool:
        """True if a page without a host copy should stay: it is needed soon, and there is room."""
        soon = self._learned.next_use(page.place, stretch) == stretch + 1
        return soon and self._kept_bytes + page.nbytes <= self._may_keep

    def _wake(self, page: _ActivationPage) -> None:
        """Mark the page as in use again, so that its memory is not freed."""
        self._end_sleep(page)
        self._awake[page.owner][page.key] = page

    def _end_sleep(self, page: _ActivationPage) -> None:
        if page.waits:
            page.waits = False
            if page.resident:
                self._idle[min(self._turn - page.left, 2)] -= page.nbytes
        if page.kept:
            page.kept = False
            self._kept_bytes -= page.nbytes

    def _keep_for_good(self, page: _ActivationPage) -> None:
        if not page.shared:
            self._share(page)
            less = min(page.nbytes, self._room - self._least_room)
            self._room -= less
            self._may_keep -= less

    def _share(self, page: _ActivationPage) -> None:
        if not page.shared:
            page.shared = True
            self._owned[page.owner] -= page.nbytes
            if page.resident:
                self._resident -= page.nbytes

    def _restore(self, page: _ActivationPage, storage: UntypedStorage) -> None:
        if page.resident and not page.arriving:
            return
        assert page.span is not None
        if page.arriving:
            self._copies.wait(page.span.read)
            page.arriving = False
        else:
            self._make_room(page.nbytes)
            storage.resize_(page.nbytes)
            self._copies.back(page.span, storage)
            self._is_back(page)

    def _is_back(self, page: _ActivationPage) -> None:
        page.resident = True
        if not page.shared:
            self._count(page.nbytes)

    def _prefetch(self, party: int, stretch: int) -> None:
        """Start copying back the pages that `party` will touch in this stretch."""
        pages = self._by_place[party]
        coming: list[tuple[_ActivationPage, UntypedStorage]] = []
        for place in sorted(self._learned.touched.get(stretch, ())):
            page = pages.get(place)
            if page is None or page.shared or page.arriving or page.kept:
                continue
            storage = page.storage()
            if storage is None:
                continue
            self._wake(page)
            if not page.resident:
                coming.append((page, storage))
        self._make_room(sum(page.nbytes for page, _ in coming))
        for page, storage in coming:
            storage.resize_(page.nbytes)
            page.arriving = True
            self._is_back(page)
        spans = [page.span for page, _ in coming if page.span is not None]
        self._copies.start(spans, [storage for _, storage in coming], out=False)

    def _make_room(self, nbytes: int) -> None:
        """Free the device memory of waiting pages until `nbytes` more fit."""
        if self._resident + nbytes > self._room:
            self._forget_freed(self._awake[self._party].values())
        aside = []
        while self._resident + nbytes > self._room and self._waiting:
            entry = heappop(self._waiting)
            page = entry[-1]
            if not page.waits or page.left != entry[2]:
                continue  # It has been woken since.
            if page.left >= self._turn - 1:
                aside.append(entry)  # Its copy may still run, and the compute stream would wait.
                continue
            self._end_sleep(page)
            storage = page.storage()
            if storage is not None:
                self._free(page, storage)
        for entry in aside:
            heappush(self._waiting, entry)

    def _free(self, page: _ActivationPage, storage: UntypedStorage) -> None:
        """Free the device memory of a page that the host has a copy of."""
        assert page.span is not None
        if page.arriving:  # It was prefetched but not used.
            self._copies.wait(page.span.read)
            page.arriving = False
        self._copies.wait(page.span.written)
        storage.resize_(0)
        page.resident = False
        self._resident -= page.nbytes

    def _forget_freed(self, pages: Iterable[_ActivationPage]) -> None:
        """Forget those pages whose storages have been freed."""
        for page in list(pages):
            if page.storage() is None:
                self._forget(page)

    def _forget(self, page: _ActivationPage) -> None:
        self._end_sleep(page)
        self._drop_host_copy(page)
        self._share(page)  # Its bytes are no longer counted.
        page.resident = False
        self._pages.pop(page.key, None)
        self._awake[page.owner].pop(page.key, None)
        self._by_place[page.owner].pop(page.place, None)
        UntypedStorage._free_weak_ref(page.weak)

    def _drop_host_copy(self, page: _ActivationPage) -> None:
        if page.span is not None:
            self._pool.give(page.span)
            page.span = None

    def _is_gradient(self, page: _ActivationPage) -> bool:
        return any(
            parameter.grad is not None and storage_key(parameter.grad) == page.key
            for parameter in self._gradients.get(page.nbytes, ())
        )

    def _count(self, nbytes: int) -> None:
        """Count bytes that are on the device now, and learn the peaks."""
        self._resident += nbytes
        busy = self._resident - self._idle[2] - self._kept_bytes
        if self._resident > self._peak or busy > self._learned.busy:
            before = self._resident
            self._forget_freed(self._awake[self._party].values())
            self._peak = max(self._peak, self._resident)
            self._learned.busy = max(self._learned.busy, busy - (before - self._resident))


class WatchedOperations(TorchDispatchMode):
    """A dispatch mode that restores the inputs of every operation and registers its outputs.

    `execute(func, args, kwargs)` runs the operation; by default it is called.
    """

    def __init__(
        self, pages: ActivationPages, execute: Callable[[Any, Any, Any], Any] | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pages = pages
        self._execute = execute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NEEDS_NO_DATA:
            return func(*args, **kwargs)
        given = {id(tensor): tensor for tensor in _tensors_in((args, tuple(kwargs.values())))}
        for tensor in given.values():
            self._pages.touched(tensor)
        execute = self._execute
        out = func(*args, **kwargs) if execute is None else execute(func, args, kwargs)
        for position, name in written_arguments(func):
            for tensor in _tensors_in(args[position] if position < len(args) else kwargs.get(name)):
                self._pages.written(tensor)
        owned = {storage_key(tensor) for tensor in given.values()}
        for tensor in _tensors_in(out):
            if storage_key(tensor) not in owned:
                self._pages.created(tensor)
        return out


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors_in(item)
