"""What a step really used: live tensor bytes on the CPU, the allocator and the driver on CUDA.

```python
with MemoryMeter(model=model, optimizer=optimizer) as meter:
    loss(model, micro).total.backward()
    optimizer.step()
meter.peak                 # bytes
meter.peak_by_category     # {"parameters": …, "gradients": …, "activations": …, …}
```

The meter watches every operation (a dispatch mode), so it also works under fake tensors, where
nothing is computed: that is how `memory.predict` predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.memory.ledger import CATEGORIES, Ledger, storages_of

__all__ = [
    "CATEGORIES",
    "CudaPeak",
    "MemoryMeter",
    "cuda_peak",
    "peak_with_recordings",
    "reset_cuda_peak",
]


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of live tensors while it is entered, exactly, by category.

    - parameters, buffers: of `model`
    - gradients: what `p.grad` holds after a backward
    - optimizer state: what `optimizer.state` holds
    - activations: made by a forward (or by recomputing a checkpointed block) and still alive when
      the backward that needs them begins
    - temporaries: everything else that was made while the meter was on
    - inputs: everything that was there before and was used: the batch, constants, other models
    - communication: what a prediction knows to be a bucket of gradients on its way to other ranks

    Only tensors on `device` count (default: where the model is). `limit` makes a run under the
    meter raise `torch.OutOfMemoryError` as soon as more bytes than that are alive, as a device of
    that size would; inputs do not count towards it, because on a device only the micro-batch is
    there, and here it is a view of all of the user's batch. `granule` rounds each storage up, as
    CUDA's allocator does (512).

    What a kernel allocates inside itself and frees before it returns is not seen.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | str | None = None,
        limit: int | None = None,
        granule: int = 1,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self._model = model
        self._optimizer = optimizer
        self._device_type = _device_type(model, device)
        self._ledger = Ledger(granule=granule)
        self._in_backward = False
        self._forward_began = 0
        self._recompute_began: int | None = None

    # What was used

    @property
    def current(self) -> int:
        """Live bytes now."""
        return self._ledger.current

    @property
    def peak(self) -> int:
        """The most bytes that were alive at one moment."""
        return self._ledger.peak

    @property
    def largest(self) -> int:
        """The largest single storage that was made since the start or `reset_peak`."""
        return self._ledger.largest

    @property
    def current_by_category(self) -> dict[str, int]:
        """Live bytes now, by category."""
        self._mark_known()
        return self._ledger.current_by_category()

    @property
    def peak_by_category(self) -> dict[str, int]:
        """What the peak was made of; the values add up to `peak`."""
        self._mark_known()
        return self._ledger.peak_by_category()

    def reset_peak(self) -> None:
        """Let the peak start again from what is alive now."""
        self._mark_known()
        self._ledger.reset_peak()

    def note_largest(self, nbytes: int) -> None:
        """Count a storage that was made before the peak was reset among the largest."""
        self._ledger.largest = max(self._ledger.largest, nbytes)

    def mark(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what tensors are for that no model or optimizer holds, such as gradient buffers."""
        if category not in CATEGORIES:
            raise ValueError(f"category={category!r}: must be one of {', '.join(CATEGORIES)}")
        for tensor in tensors:
            device = getattr(tensor, "fake_device", None) or tensor.device
            if device.type == self._device_type:
                for storage in storages_of(tensor):
                    self._ledger.see(storage, category).category = category

    # How it watches

    def __enter__(self) -> MemoryMeter:
        if self._model is not None:
            self.mark("buffers", self._model.buffers())
            self.mark("parameters", self._model.parameters())
        self._mark_known()
        self._forward_began = self._ledger.clock
        _watch_sizes(self._ledger)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc, traceback)  # type: ignore[no-untyped-call]
        _unwatch_sizes(self._ledger)
        self._follow(in_backward=False, recomputing=False)
        self._mark_known()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._counted(func, args, kwargs or {})

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        self._follow(in_backward=in_backward, recomputing=in_backward and torch.is_grad_enabled())
        self._see(args, "inputs")
        if kwargs:
            self._see(kwargs.values(), "inputs")
        result = self._call(func, args, kwargs)
        self._see((result,), "temporaries")
        if self.limit is not None:
            used = self._ledger.current - self._ledger.given
            if used > self.limit:
                del result
                raise torch.OutOfMemoryError(
                    f"{func} left {used} bytes of tensors alive, more than the budget of"
                    f" {self.limit}"
                )
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _see(self, values: Iterable[Any], category: str) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                # A fake tensor's `.device` is an operation of its own, and would double the cost.
                device = getattr(value, "fake_device", None) or value.device
                if device.type == self._device_type:
                    for storage in storages_of(value):
                        self._ledger.see(storage, category)
            elif isinstance(value, (list, tuple)):
                self._see(value, category)

    def _follow(self, *, in_backward: bool, recomputing: bool) -> None:
        """Notice where forward, backward and recomputation begin and end."""
        if in_backward and not self._in_backward:
            # What the forward made and still lives now lives for the backward.
            self._mark_known()
            self._mark_activations(since=self._forward_began)
        elif self._in_backward and not in_backward:
            self._mark_gradients()
            self._forward_began = self._ledger.clock
        self._in_backward = in_backward
        if recomputing:
            if self._recompute_began is None:
                self._recompute_began = self._ledger.clock
        elif self._recompute_began is not None:
            self._mark_activations(since=self._recompute_began)
            self._recompute_began = None

    def _mark_activations(self, *, since: int) -> None:
        for record in self._ledger.since(since):
            if record.category == "temporaries":
                record.category = "activations"

    def _mark_known(self) -> None:
        self._mark_gradients()
        if self._optimizer is not None:
            self.mark("optimizer state", _tensors(self._optimizer.state.values()))

    def _mark_gradients(self) -> None:
        self.mark("gradients", (p.grad for p in self._parameters() if p.grad is not None))

    def _parameters(self) -> Iterable[torch.Tensor]:
        if self._model is not None:
            yield from self._model.parameters()
        elif self._optimizer is not None:
            for group in self._optimizer.param_groups:
                yield from group["params"]


_LEDGERS: list[Ledger] = []
"""Those of the meters that are on."""


def _watch_sizes(ledger: Ledger) -> None:
    """Tell the ledger of storages that get another size, which no operation shows.

    So FSDP2 frees its gathered parameters, and a window in lock-step what it sends to the host.
    """
    _LEDGERS.append(ledger)
    torch.UntypedStorage.resize_ = _resize_and_tell  # type: ignore[method-assign, assignment]


def _unwatch_sizes(ledger: Ledger) -> None:
    _LEDGERS.remove(ledger)
    if not _LEDGERS:
        del torch.UntypedStorage.resize_  # the base class's own is there again


def _resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
    resized = super(torch.UntypedStorage, storage).resize_(size)
    for ledger in _LEDGERS:
        ledger.resized(storage)
    return resized


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _device_type(model: torch.nn.Module | None, device: torch.device | str | None) -> str:
    if device is not None:
        return torch.device(device).type
    if model is not None:
        for tensor in model.parameters():
            return tensor.device.type
    return "cpu"


@dataclass(frozen=True)
class CudaPeak:
    """The most that CUDA memory was used for, from three places that see different things."""

    allocated: int
    """Bytes of live tensors at the allocator's peak, rounded to its blocks."""

    reserved: int
    """Bytes the allocator had taken from the driver at its peak: fragmentation included."""

    device_used: int
    """Bytes in use on the whole device now, as the driver says: the CUDA context, libraries'
    workspaces, graph pools, and other processes as well."""


def cuda_peak(device: torch.device | str | int | None = None) -> CudaPeak:
    """What CUDA's allocator and driver say about memory since `reset_cuda_peak` (or the start)."""
    free, total = torch.cuda.mem_get_info(device)
    return CudaPeak(
        allocated=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.max_memory_reserved(device),
        device_used=total - free,
    )


def peak_with_recordings(device: torch.device) -> int:
    """The allocator's peak of live tensors, and what replays of CUDA graphs use beside it.

    A recording keeps its activations' memory in a pool of its own, where the allocator counts no
    live tensor when it is replayed.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    idle: int = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )
    return int(torch.cuda.max_memory_allocated(device)) + idle


def reset_cuda_peak(device: torch.device | str | int | None = None) -> None:
    """Let CUDA's peaks start again from what is alive now."""
    torch.cuda.reset_peak_memory_stats(device)
