"""Sleeping micro-batches on the host: the device holds what the one awake is working with.

Every storage that a micro-batch creates is a page. When the micro-batch goes to sleep its pages are
copied to (pinned) host memory and their device memory is given back; whoever touches one later, in
the forward or in the backward pass, finds it restored. What a stretch between two meetings touched
is learnt from the micro-batch that went through it last, and fetched ahead for the next while
another one computes.

All memory is taken and given back in the order of the caller's stream, which waits for the copies
where it must. So how far the host runs ahead of the device does not change what the device needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from wholebatch.runners.hostpool import Copies, HostPool, Span
from wholebatch.runners.onethread import Execute

__all__ = ["Paged", "Pages"]

_aten = torch.ops.aten
# What makes a new tensor on the same storage without reading it or checking its bounds.
_NEEDS_NO_DATA = frozenset(
    {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default}
)


@dataclass(frozen=True, slots=True)
class Paged:
    """What one run moved: the most bytes of pages on the device at once, and those copied."""

    peak: int
    bytes_out: int
    bytes_in: int


Place = tuple[int, int]
"""Which storage of a micro-batch: the stretch that it was made in, and its number there."""


@dataclass(eq=False, slots=True)
class _Page:
    """One storage: where its bytes are."""

    weak: int
    nbytes: int
    device: torch.device
    owner: int
    place: Place
    seen: int  # the stretch in which it was last touched
    span: Span | None = None
    resident: bool = True
    shared: bool = False  # touched by several micro-batches: it stays on the device
    leaving: bool = False  # copied out; the device memory is given back when the copy is done
    arriving: bool = False  # being fetched ahead

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if nobody holds it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return found


class Pages:
    """The pages of all micro-batches of one run.

    `enter` and `leave` are called when a micro-batch wakes and when it goes to sleep, `finish` when
    it is done; all that it computes goes through `watch`. Pages are the storages on devices of type
    `kind`. Those below `least` bytes stay there, as do gradients of `parameters`. `peak` is the
    largest number of bytes of pages that were on the device at once.
    """

    def __init__(
        self,
        parties: int,
        *,
        pool: HostPool,
        kind: str,
        parameters: Iterable[nn.Parameter] = (),
        learnt: dict[int, set[Place]] | None = None,
        least: int = 1 << 16,
    ) -> None:
        self._parties = parties
        self._copies = Copies(pool)
        self._kind = kind
        self._least = least
        self._pages: dict[int, _Page] = {}
        self._awake: list[dict[int, _Page]] = [{} for _ in range(parties)]
        self._by_place: list[dict[Place, _Page]] = [{} for _ in range(parties)]
        self._created = 0
        self._used: set[Place] = set()
        self._stretch = [-1] * parties
        self._party = 0
        self._learnt = {} if learnt is None else learnt
        self._leaving: list[_Page] = []
        self._gradients: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            size = parameter.numel() * parameter.element_size()
            self._gradients.setdefault(size, []).append(parameter)
        self.resident = 0
        self.peak = 0

    def watch(self, execute: Execute) -> Execute:
        """`execute`, with its tensors in place before and those it makes known afterwards."""

        def watched(func: Any, args: Any, kwargs: Any) -> Any:
            if func in _NEEDS_NO_DATA:
                return func(*args, **kwargs)
            given = {id(t): t for t in _tensors((args, tuple(kwargs.values())))}
            for tensor in given.values():
                self.touched(tensor)
            out = execute(func, args, kwargs)
            for position, name in _writes(func):
                target = args[position] if position < len(args) else kwargs.get(name)
                for tensor in _tensors(target):
                    self.written(tensor)
            owned = {tensor.untyped_storage()._cdata for tensor in given.values()}
            for tensor in _tensors(out):
                if tensor.untyped_storage()._cdata not in owned and not self.known(tensor):
                    self.created(tensor)
            return out

        return watched

    def enter(self, party: int) -> None:
        self._party = party
        self._stretch[party] += 1
        self._created = 0
        self._used = set()
        following = (party + 1) % self._parties
        if following != party:
            self._fetch_ahead(following, self._stretch[following] + 1)

    def leave(self, party: int) -> None:
        """Send to the host what `party` has on the device."""
        # Of the last one that went this way: the first may have made what others find made.
        self._learnt[self._stretch[party]] = self._used
        self._give_back_left()
        going: list[tuple[_Page, torch.UntypedStorage]] = []
        for key, page in list(self._awake[party].items()):
            storage = page.storage()
            if storage is None:
                self._forget(key, page)
            elif page.shared or self._is_gradient(key, page):
                page.shared = True
            elif page.span is None:
                going.append((page, storage))
            else:  # the host has it already
                self._give_back(page, storage)
        self._awake[party].clear()
        spans = self._copies.out([storage for _, storage in going])
        for (page, _), span in zip(going, spans, strict=True):
            page.span, page.leaving = span, True
            self._leaving.append(page)

    def finish(self, party: int) -> None:
        """Forget what a micro-batch that is done has left."""
        self._awake[party].clear()
        for key, page in list(self._pages.items()):
            if page.owner == party and page.storage() is None:
                self._forget(key, page)

    def close(self) -> Paged:
        """Bring back what is still held by someone, and let go of everything."""
        self._leaving.clear()
        for key, page in list(self._pages.items()):
            storage = page.storage()
            if storage is not None:
                page.leaving = False
                self._restore(page, storage)
            self._forget(key, page)
        self._copies.join()
        return Paged(self.peak, self._copies.bytes_out, self._copies.bytes_in)

    # What the watch tells.

    def touched(self, tensor: Tensor) -> None:
        """Make sure that the bytes of `tensor` are on its device."""
        key = tensor.untyped_storage()._cdata
        page = self._pages.get(key)
        if page is None:
            return
        if page.owner != self._party:
            page.shared = True
        elif page.seen != (stretch := self._stretch[page.owner]):
            page.seen = stretch
            self._used.add(page.place)
        if not page.resident or page.leaving or page.arriving:
            self._restore(page, tensor.untyped_storage())
            self._awake[page.owner][key] = page

    def written(self, tensor: Tensor) -> None:
        """The host's copy of `tensor` is no longer true."""
        page = self._pages.get(tensor.untyped_storage()._cdata)
        if page is not None and page.span is not None:
            self._copies.release(page.span)
            page.span = None

    def created(self, tensor: Tensor) -> None:
        """A new storage of the micro-batch that is awake."""
        storage = tensor.untyped_storage()
        key, party = storage._cdata, self._party
        stretch = self._stretch[party]
        place = (stretch, self._created)
        self._created += 1
        nbytes = storage.nbytes()
        if nbytes < self._least or storage.device.type != self._kind:
            return
        weak = cast(int, storage._weak_ref())
        page = _Page(weak, nbytes, storage.device, party, place, stretch)
        self._pages[key] = self._awake[party][key] = self._by_place[party][place] = page
        self._count(nbytes)

    def keep(self, tensor: Tensor) -> None:
        """`tensor` belongs to all micro-batches: it stays on the device."""
        page = self._pages.get(tensor.untyped_storage()._cdata)
        if page is not None:
            page.shared = True

    def known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pages

    # How pages move.

    def _restore(self, page: _Page, storage: torch.UntypedStorage) -> None:
        if page.leaving:  # the copy may go on: the bytes have not been given back
            page.leaving = False
        elif page.arriving:
            assert page.span is not None
            self._copies.arrived(page.span)
            page.arriving = False
        elif not page.resident:
            assert page.span is not None
            storage.resize_(page.nbytes)
            self._copies.back(page.span, storage)
            page.resident = True
            self._count(page.nbytes)

    def _fetch_ahead(self, party: int, stretch: int) -> None:
        pages = self._by_place[party]
        coming: list[tuple[Span, torch.UntypedStorage]] = []
        for place in sorted(self._learnt.get(stretch, ())):
            page = pages.get(place)
            if page is None or page.shared or page.arriving or (page.resident and not page.leaving):
                continue
            storage = page.storage()
            if storage is None:
                continue
            if page.leaving:
                page.leaving = False
            else:
                assert page.span is not None
                storage.resize_(page.nbytes)
                coming.append((page.span, storage))
                page.resident = page.arriving = True
                self._count(page.nbytes)
            self._awake[party][storage._cdata] = page
        self._copies.ahead([span for span, _ in coming], [storage for _, storage in coming])

    def _give_back_left(self) -> None:
        left, self._leaving = self._leaving, []
        for page in left:
            if not page.leaving:
                continue
            page.leaving = False
            storage = page.storage()
            if storage is not None:
                self._give_back(page, storage)

    def _give_back(self, page: _Page, storage: torch.UntypedStorage) -> None:
        assert page.span is not None
        if page.arriving:  # fetched ahead and not used after all
            self._copies.arrived(page.span)
            page.arriving = False
        self._copies.gone(page.span)
        storage.resize_(0)
        page.resident = False
        self.resident -= page.nbytes

    def _forget(self, key: int, page: _Page) -> None:
        if page.span is not None:
            self._copies.release(page.span)
            page.span = None
        if page.resident:
            self.resident -= page.nbytes
            page.resident = False
        self._pages.pop(key, None)
        self._awake[page.owner].pop(key, None)
        self._by_place[page.owner].pop(page.place, None)
        torch.UntypedStorage._free_weak_ref(page.weak)

    def _is_gradient(self, key: int, page: _Page) -> bool:
        return any(
            parameter.grad is not None and parameter.grad.untyped_storage()._cdata == key
            for parameter in self._gradients.get(page.nbytes, ())
        )

    def _count(self, nbytes: int) -> None:
        self.resident += nbytes
        if self.resident > self.peak:
            for key, page in list(self._awake[self._party].items()):
                if page.storage() is None:
                    self._forget(key, page)
            self.peak = max(self.peak, self.resident)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operation writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
