"""The measured memory of a step: live tensor bytes, and on CUDA the allocator and the driver.

```python
with MemoryMeter(model=model, optimizer=optimizer) as meter:
    loss(model, micro).total.backward()
    optimizer.step()
meter.peak                 # bytes
meter.peak_by_category     # {"parameters": …, "gradients": …, "activations": …, …}
```

The meter is a dispatch mode that sees every operation. It also works with fake tensors, which
compute nothing: `memory.predict` uses it that way. torch's own `MemTracker` counts the same bytes
in every case of `tests/memory/models.py`, but takes three to seven times as long on fake tensors,
and refuses a second forward.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.batch.samples import tensors_of
from wholebatch.readable_sizes import CATEGORIES
from wholebatch.window.autograd_graph import in_backward


class _Record:
    """One storage: its bytes, its category, and when it was first seen."""

    __slots__ = ("born", "category", "nbytes", "ref")

    def __init__(self, nbytes: int, category: str, born: int) -> None:
        self.nbytes = nbytes
        self.category = category
        self.born = born
        self.ref: _StorageRef | None = None


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """A weak reference that carries the data of its callback, so that it needs no closure."""

    __slots__ = ("key", "record")
    key: int
    record: _Record


class MemoryMeter(TorchDispatchMode):
    """An exact count of the bytes of live tensors, by category, while the context is entered.

    - parameters, buffers: of `model`
    - gradients: held by `p.grad` after a backward
    - optimizer state: held by `optimizer.state`
    - activations: made by a forward (or by recomputing a checkpointed block) and still alive when
      the backward that needs them begins
    - temporaries: everything else that was made under the meter
    - inputs: tensors made before and used under the meter: the batch, constants, other models
    - communication: buckets of gradients for other ranks, in a prediction

    Only tensors on `device` count (default: the model's). `granule` rounds each storage up, as
    CUDA's allocator does (512).

    Memory belongs to storages, not to tensors. Views share a storage, and it outlives its first
    tensor as long as anything (a graph's saved tensor, a view, `p.grad`) holds it. So each storage
    counts once, from the moment it is first seen until it is freed. Storages are identified by
    object and tracked by weak reference: an allocator reuses an address within microseconds.
    Memory that a kernel allocates and frees before it returns is not seen.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | str | None = None,
        granule: int = 1,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        """The bytes that are alive now."""
        self.peak = 0
        """The largest number of bytes alive at one moment."""
        self.largest = 0
        """The bytes of the largest storage made since the start or `reset_peak`."""
        self._model = model
        self._optimizer = optimizer
        self._device_type = _device_type(model, device)
        self._granule = granule
        self._clock = 0
        self._live: dict[int, _Record] = {}  # By id, the oldest first.
        self._peak_at = 0
        # Alive at the peak and freed since. The category of a storage may become known late, so the
        # peak is kept as the records that were alive then, not as numbers by category.
        self._dead_since_peak: list[_Record] = []
        self._in_backward = False
        self._forward_began = 0
        self._recompute_began: int | None = None

    # Results

    @property
    def current_by_category(self) -> dict[str, int]:
        """The bytes that are alive now, by category."""
        self._mark_known()
        return _by_category(list(self._live.values()))

    @property
    def peak_by_category(self) -> dict[str, int]:
        """The bytes alive at the peak, by category; they add up to `peak`."""
        self._mark_known()
        live = [record for record in list(self._live.values()) if record.born <= self._peak_at]
        return _by_category(live + self._dead_since_peak)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are alive now."""
        self._mark_known()
        self.largest = 0
        self._begin_peak()

    def mark(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Set the category of tensors outside the model and optimizer, such as gradient buffers."""
        if category not in CATEGORIES:
            raise ValueError(f"category={category!r}: must be one of {', '.join(CATEGORIES)}")
        for tensor in tensors:
            for storage in self._counted_storages(tensor):
                self._see_storage(storage, category).category = category

    # Operations

    def __enter__(self) -> MemoryMeter:
        if self._model is not None:
            self.mark("buffers", self._model.buffers())
            self.mark("parameters", self._model.parameters())
        self._mark_known()
        self._forward_began = self._clock
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._follow(in_backward=False, recomputing=False)
        self._mark_known()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._counted(func, args, kwargs or {})

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        backward = in_backward()
        self._follow(in_backward=backward, recomputing=backward and torch.is_grad_enabled())
        self._see(args, "inputs")
        if kwargs:
            self._see(kwargs.values(), "inputs")
        result = self._call(func, args, kwargs)
        self._see((result,), "temporaries")
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _see(self, values: Iterable[Any], category: str) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                for storage in self._counted_storages(value):
                    self._see_storage(storage, category)
            elif isinstance(value, (list, tuple)):
                self._see(value, category)

    def _counted_storages(self, tensor: torch.Tensor) -> list[torch.UntypedStorage]:
        # A fake tensor's `.device` is dispatched as an operation, which is slow.
        device = getattr(tensor, "fake_device", None) or tensor.device
        return storages_of(tensor) if device.type == self._device_type else []

    # Storages

    def _see_storage(self, storage: torch.UntypedStorage, category: str) -> _Record:
        """Return the record of a storage; a new storage gets this category."""
        key = id(storage)  # torch keeps one Python object for each storage as long as it is alive
        record = self._live.get(key)
        if record is not None:
            if record.nbytes == self._rounded(storage.nbytes()):
                return record
            category = record.category  # Resized: end the old record, which may be in the peak.
            if record.ref is not None:
                self._died(record.ref)
        self._clock += 1
        record = _Record(self._rounded(storage.nbytes()), category, self._clock)
        reference = _StorageRef(storage, self._died)
        reference.key, reference.record = key, record
        record.ref = reference
        self._live[key] = record
        self.largest = max(self.largest, record.nbytes)
        self.current += record.nbytes
        if self.current > self.peak:
            self._begin_peak()
        return record

    def _begin_peak(self) -> None:
        self.peak, self._peak_at = self.current, self._clock
        self._dead_since_peak.clear()

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _StorageRef)
        record = reference.record
        record.ref = None
        if self._live.get(reference.key) is record:
            del self._live[reference.key]
        self.current -= record.nbytes
        if record.born <= self._peak_at:
            self._dead_since_peak.append(record)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granule) * self._granule

    # Categories

    def _follow(self, *, in_backward: bool, recomputing: bool) -> None:
        """Detect where forward, backward and recomputation begin and end."""
        if in_backward and not self._in_backward:
            # Tensors of the forward that are still alive are kept for the backward.
            self._mark_known()
            self._mark_activations(since=self._forward_began)
        elif self._in_backward and not in_backward:
            self._mark_gradients()
            self._forward_began = self._clock
        self._in_backward = in_backward
        if recomputing:
            if self._recompute_began is None:
                self._recompute_began = self._clock
        elif self._recompute_began is not None:
            self._mark_activations(since=self._recompute_began)
            self._recompute_began = None

    def _mark_activations(self, *, since: int) -> None:
        for record in reversed(self._live.values()):  # the youngest first
            if record.born <= since:
                break
            if record.category == "temporaries":
                record.category = "activations"

    def _mark_known(self) -> None:
        self._mark_gradients()
        if self._optimizer is not None:
            self.mark("optimizer state", tensors_of(list(self._optimizer.state.values())))

    def _mark_gradients(self) -> None:
        self.mark("gradients", (p.grad for p in self._parameters() if p.grad is not None))

    def _parameters(self) -> Iterable[torch.Tensor]:
        if self._model is not None:
            yield from self._model.parameters()
        elif self._optimizer is not None:
            for group in self._optimizer.param_groups:
                yield from group["params"]


def _device_type(model: torch.nn.Module | None, device: torch.device | str | None) -> str:
    if device is not None:
        return torch.device(device).type
    if model is not None:
        for tensor in model.parameters():
            return tensor.device.type
    return "cpu"


def free_caches() -> None:
    """Free what is no longer used: cycles of graphs and hooks, cached casts, CUDA's cache."""
    torch.clear_autocast_cache()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def peak_with_recordings(device: torch.device) -> int:
    """Return the allocator's peak of live tensors plus the memory that CUDA graph replays use.

    A CUDA graph keeps its activations in a pool of its own. The allocator counts no live tensors
    there during a replay.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    idle: int = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )
    return int(torch.cuda.max_memory_allocated(device)) + idle


def _by_category(records: list[_Record]) -> dict[str, int]:
    """Return the bytes of records by category, with 0 for empty ones."""
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
    return []  # Another layout: its bytes are not counted.
