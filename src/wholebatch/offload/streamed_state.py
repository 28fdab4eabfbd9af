"""Optimizer state in host memory, copied to the device and back bucket by bucket.

Every tensor of `optimizer.state[p]` that has the shape and the device of `p` is moved. Between
steps it is in pinned host memory; on a CPU, "host memory" is memory like any other. Around the step
on a bucket it is on the device. While one bucket is stepped, the next one is copied to the device
and the one before back to the host, on streams of their own. At most three are on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

_SLAB_BYTES = 2**28
_ALIGNMENT = 64  # in elements

Bucket = Sequence[nn.Parameter]


class StreamedState:
    """The host memory of optimizers' state, and its way to the devices and back."""

    def __init__(self) -> None:
        self._host: dict[tuple[int, str], Tensor] = {}  # by the parameter's id and the state's name
        self._slabs: dict[tuple[torch.dtype, bool], Tensor] = {}  # the rest of the last slab
        self._links: dict[torch.device, _Link] = {}
        self.host_bytes = 0
        """The bytes of host memory that were allocated."""

    @torch.no_grad()
    def move_to_host(self, optimizer: torch.optim.Optimizer) -> None:
        """Move state that is on the device: that of a loaded checkpoint, or of steps before."""
        for parameter, name, tensor in _parameter_shaped(optimizer, optimizer.state):
            place = self._place(parameter, name, tensor)
            if place is not tensor:
                optimizer.state[parameter][name] = place.copy_(tensor)

    def step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Step bucket by bucket.

        Parameters without a gradient are left out. If a step raises, the state of its bucket is as
        it was before. In the end all state is on the host.
        """
        used = [[p for p in bucket if p.grad is not None] for bucket in buckets]
        fetched: deque[_Fetched] = deque()
        try:
            for bucket in filter(None, used):
                fetched.append(self._fetch(optimizer, bucket))
                if len(fetched) == 2:
                    self._step(optimizer, fetched.popleft())
            while fetched:
                self._step(optimizer, fetched.popleft())
        finally:
            for link in self._links.values():
                link.finish()

    def _step(self, optimizer: torch.optim.Optimizer, fetched: _Fetched) -> None:
        """Step one bucket with its state on the device, and start copying the state back."""
        link = self._links[fetched.parameters[0].device]
        link.wait(fetched.arrived)
        for parameter, name, tensor in fetched.tensors:
            optimizer.state[parameter][name] = tensor
        try:
            with only(optimizer, fetched.parameters):
                optimizer.step()
        except BaseException:
            for parameter, name, _ in fetched.tensors:
                optimizer.state[parameter][name] = self._host[id(parameter), name]
            raise
        # The step may have replaced tensors, and the first one has created them.
        pairs = []
        for parameter, name, tensor in _parameter_shaped(optimizer, fetched.parameters):
            place = self._place(parameter, name, tensor)
            optimizer.state[parameter][name] = place
            pairs.append((place, tensor))
        link.send(pairs)

    def _fetch(self, optimizer: torch.optim.Optimizer, bucket: list[nn.Parameter]) -> _Fetched:
        """Start copying the state of a bucket to the device."""
        device = bucket[0].device
        link = self._links.setdefault(device, _Link(device))
        fetched = _Fetched(bucket)
        hosts = []
        for parameter in bucket:
            for name in [*optimizer.state.get(parameter, ())]:
                place = self._host.get((id(parameter), name))
                if place is not None:
                    fetched.tensors.append(
                        (parameter, name, torch.empty_like(place, device=device))
                    )
                    hosts.append(place)
        fetched.arrived = link.fetch(
            [(tensor, host) for (*_, tensor), host in zip(fetched.tensors, hosts, strict=True)]
        )
        return fetched

    def _place(self, parameter: Tensor, name: str, tensor: Tensor) -> Tensor:
        """Return the host memory of a state tensor, allocated on first use."""
        key = id(parameter), name
        place = self._host.get(key)
        if place is None or place.dtype is not tensor.dtype or place.shape != tensor.shape:
            place = self._host[key] = self._allocated(tensor)
        return place

    def _allocated(self, like: Tensor) -> Tensor:
        """Return host memory from a large slab: pinning is slow, and rounds up to a power of two.

        Slabs grow with what is there already, so that a small model does not pin much. Each has one
        dtype: torch.save refuses tensors of two dtypes in one storage.
        """
        dtype, pinned = like.dtype, like.device.type == "cuda"
        size = -(-like.numel() // _ALIGNMENT) * _ALIGNMENT
        slab = self._slabs.get((dtype, pinned))
        if slab is None or size > len(slab):
            grown = min(_SLAB_BYTES, self.host_bytes // 4) // dtype.itemsize
            slab = torch.empty(max(size, grown), dtype=dtype, pin_memory=pinned)
            self.host_bytes += slab.nbytes
        self._slabs[dtype, pinned] = slab[size:]
        if like.numel() and torch.empty_like(like, device="meta").stride() != like.stride():
            return slab[: like.numel()].view(like.shape)  # it has gaps; any order will do
        return slab.as_strided(like.shape, like.stride(), slab.storage_offset())


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Make `optimizer.step()` step these parameters alone, each with its group's options."""
    chosen = {id(parameter) for parameter in parameters}
    all_of_them = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
    try:
        yield
    finally:
        for group, everyone in zip(optimizer.param_groups, all_of_them, strict=True):
            group["params"] = everyone


def _parameter_shaped(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]
) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yield the state tensors that have their parameter's shape and are not on another device.

    A step counter on the CPU stays there. The state of a CUDA parameter that is pinned on the host
    has been moved before.
    """
    for parameter in [*parameters]:
        for name, value in [*optimizer.state.get(parameter, {}).items()]:
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.device == parameter.device
            ):
                yield parameter, name, value


@dataclass(eq=False)
class _Fetched:
    """A bucket whose state is on its way to the device."""

    parameters: list[nn.Parameter]
    tensors: list[tuple[Tensor, str, Tensor]] = field(default_factory=list)
    arrived: torch.cuda.Event | None = None


class _Link:
    """Copies between the host and one device, on streams of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = (
            (torch.cuda.Stream(device), torch.cuda.Stream(device))
            if device.type == "cuda"
            else None
        )
        self._leaving: deque[tuple[list[Tensor], torch.cuda.Event | None]] = deque()

    def fetch(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy the second tensor of each pair, on the host, into the first, on the device."""
        while len(self._leaving) >= 2:  # their memory may be used again after the wait
            _, left = self._leaving.popleft()
            self.wait(left)
        return self._copy(pairs, 0)

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair, on the device, into the first, on the host."""
        self._leaving.append(([tensor for _, tensor in pairs], self._copy(pairs, 1)))

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the device's current stream wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """Wait until everything is on the host: its state may be read from here on."""
        if self._streams is not None:
            to_device, to_host = self._streams
            torch.cuda.current_stream(self._device).wait_stream(to_device)
            torch.cuda.current_stream(self._device).wait_stream(to_host)
            to_host.synchronize()
        self._leaving.clear()

    @torch.no_grad()
    def _copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], direction: int
    ) -> torch.cuda.Event | None:
        """Copy beside the device's work, after what it has been given so far."""
        if self._streams is None:
            for to, source in pairs:
                to.copy_(source)
            return None
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
        return event
