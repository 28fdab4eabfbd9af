"""Live bytes now and at the peak, by category, with one entry per storage.

Memory belongs to storages, not to tensors. Views share a storage, and it outlives its first tensor
as long as anything (a graph's saved tensor, a view, `p.grad`) holds it. So the ledger counts each
storage once, from the moment it is first seen until it is freed.

Storages are identified by object and tracked by weak reference. Addresses do not identify them: an
allocator reuses the same `data_ptr` within microseconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from wholebatch.core.readable_sizes import CATEGORIES

__all__ = ["CATEGORIES", "Ledger", "Record", "storages_of"]


class Record:
    """One storage: its bytes, its category, and when it was first seen."""

    __slots__ = ("born", "category", "is_given", "nbytes", "ref")

    def __init__(self, nbytes: int, category: str, born: int) -> None:
        self.nbytes = nbytes
        self.is_given = category == "inputs"
        self.category = category
        self.born = born
        self.ref: _StorageRef | None = None


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """A weak reference that carries the data of its callback, so that it needs no closure."""

    __slots__ = ("key", "record")
    key: int
    record: Record


class Ledger:
    """The live storages, the peak of their sum with its records, and the largest new storage.

    The category of a storage may become known late: a tensor turns out to be a saved activation
    when the backward begins, or a gradient when it has ended. So the peak is kept as the set of
    records that were alive then, not as numbers by category.
    """

    def __init__(self, *, granule: int = 1) -> None:
        self.current = 0
        self.given = 0  # The part of `current` that was first seen as an input.
        self.peak = 0
        self.largest = 0
        self.clock = 0
        self._granule = granule
        self.live: dict[int, Record] = {}  # By the address of the storage object.
        self._peak_at = 0
        # Alive at the peak and freed since. They are needed to split the peak by category.
        self._dead_since_peak: list[Record] = []

    def see(self, storage: torch.UntypedStorage, category: str) -> Record:
        """Return the record of a storage; a new storage gets this category."""
        key = storage._cdata
        record = self.live.get(key)
        if record is not None:
            if record.nbytes == self._rounded(storage.nbytes()):
                return record
            category = record.category  # Resized: end the old record, which may be in the peak.
            if record.ref is not None:
                self._died(record.ref)
        self.clock += 1
        record = Record(self._rounded(storage.nbytes()), category, self.clock)
        reference = _StorageRef(storage, self._died)
        reference.key = key
        reference.record = record
        record.ref = reference
        self.live[key] = record
        self.largest = max(self.largest, record.nbytes)
        if record.is_given:
            self.given += record.nbytes
        self._grow(record.nbytes)
        return record

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage; ignore one that was never seen."""
        record = self.live.get(storage._cdata)
        if record is not None:
            self.see(storage, record.category)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are alive now."""
        self.peak = self.current
        self.largest = 0
        self._peak_at = self.clock
        self._dead_since_peak.clear()

    def since(self, born: int) -> Iterator[Record]:
        """Return the live records that were first seen after `born`, youngest first."""
        # A dict keeps insertion order, so this visits only the young records. Copy them to a list:
        # garbage collection may free a storage while the caller iterates.
        young: list[Record] = []
        for record in reversed(self.live.values()):
            if record.born <= born:
                break
            young.append(record)
        return iter(young)

    def current_by_category(self) -> dict[str, int]:
        """Return the live bytes now, by category, with 0 for empty ones."""
        return _by_category(list(self.live.values()))

    def peak_by_category(self) -> dict[str, int]:
        """Return the bytes alive at the peak, by category; they add up to `peak`."""
        at_peak = [r for r in list(self.live.values()) if r.born <= self._peak_at]
        return _by_category(at_peak + self._dead_since_peak)

    def _grow(self, nbytes: int) -> None:
        self.current += nbytes
        if self.current > self.peak:
            self.peak = self.current
            self._peak_at = self.clock
            self._dead_since_peak.clear()

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _StorageRef)
        record = reference.record
        record.ref = None
        if self.live.get(reference.key) is record:
            del self.live[reference.key]
        self.current -= record.nbytes
        if record.is_given:
            self.given -= record.nbytes
        if record.born <= self._peak_at:
            self._dead_since_peak.append(record)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granule) * self._granule


def _by_category(records: list[Record]) -> dict[str, int]:
    totals = dict.fromkeys(CATEGORIES, 0)
    for record in records:
        totals[record.category] = totals.get(record.category, 0) + record.nbytes
    return totals


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor: one if it is plain, several if sparse or wrapped."""
    parts = _parts_of(tensor)
    if parts is None:
        return [tensor.untyped_storage()]
    return [storage for part in parts for storage in storages_of(part)]


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the inner tensors of a tensor, or None if it has a storage itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        parts = (getattr(tensor, name) for name in names)
        return [part for part in parts if isinstance(part, torch.Tensor)]  # Skip DTensor's mesh.
    layout = tensor.layout
    if layout is torch.strided:
        return None
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # An opaque layout (MKL-DNN): Python cannot reach its bytes.
