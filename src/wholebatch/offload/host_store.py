"""Gradients leave the device as soon as they are made, and are summed on the host.

Hooks hand each micro-batch's gradient of a parameter over (`transfer_to_host`) and free it. At the
close the sums are reduced, normalised and clipped where they are; then they come back bucket by
bucket, two at most at once, and the optimizer steps on each bucket's parameters. A sum that the
last backward of a window completes need not leave, if its activations have left room on the device.
With `optimizer_on="host"` the parameters of a bucket come to the host instead, and the optimizer's
state stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.distributed import Sync
from wholebatch.errors import UnsupportedError
from wholebatch.offload.graph_sums import GraphSums
from wholebatch.offload.parameter_buckets import (
    Bucket,
    HostSums,
    flat_of,
    in_parts,
    in_shape_of,
    one_ahead,
    only,
    total_norm,
)
from wholebatch.offload.transfer_to_host import CudaTransfer, HostTransfer
from wholebatch.window.close import (
    Closed,
    CloseOptions,
    DeferredHooks,
    close_gradients,
    read_scalars,
    stepping,
)
from wholebatch.window.gradient_store import Store

if TYPE_CHECKING:
    from wholebatch.window.model_and_optimizer import Target
    from wholebatch.window.window import OpenWindow


_SMALLEST_TO_STAY = 2**20
"""Smaller sums travel: asking for room costs more."""

_Buckets: TypeAlias = Sequence[tuple[Bucket, list[nn.Parameter]]]
"""Buckets, each with those of its parameters that have a gradient."""


def _transfer(device: torch.device, nbytes: int) -> HostTransfer | CudaTransfer:
    return CudaTransfer(device, nbytes) if device.type == "cuda" else HostTransfer()


class HostStore(Store):
    """Sums on the host, in float32 or better; the device never holds all gradients."""

    option = 'gradients="host"'
    in_grad = False

    def __init__(
        self, target: Target, options: CloseOptions, sync: Sync, *, steps_on_host: bool = False
    ) -> None:
        super().__init__(target, options, sync)
        self._steps_on_host = steps_on_host
        self.counts_changes = not steps_on_host  # there the parameters' memory is replaced
        self.sums = HostSums([])
        """The sums, which gradients may still be on their way to."""
        self._transfers: dict[torch.device, HostTransfer | CudaTransfer] = {}
        self._is_last = False
        self._may_stay = self._has_stepped = False
        self._on_device = SumsOnDevice()
        self.norms: dict[int, list[Tensor]] = {}
        """The norms of complete sums, by their address."""

    @property
    def bytes_out(self) -> int:
        """Bytes of gradients that have left the devices so far."""
        return sum(transfer.bytes_out for transfer in self._transfers.values())

    @property
    def host_bytes(self) -> int:
        """Host memory of the sums."""
        return self.sums.bytes

    # Open window

    def begin(self, window: OpenWindow) -> None:
        super().begin(window)
        parameters = window.inputs
        self.target.sixteen_bit.begin()  # hooks see what the plain window would add
        if not self.sums.is_for(parameters):
            self.sums = HostSums([])  # first, so that two sets never exist at once
            self.sums = HostSums.of(parameters, self.target.optimizers)
        self.sums.filled = set()
        self._on_device.begin(parameters)
        for parameter in parameters:
            if parameter.device not in self._transfers:
                self._transfers[parameter.device] = _transfer(parameter.device, self.sums.bytes)
        self.hook(self._leave)

    def _leave(self, parameter: Tensor) -> None:
        """Hand over the gradient that a backward has made."""
        gradient = parameter.grad
        if gradient is None:  # a function of the graph returned none
            return
        assert isinstance(parameter, nn.Parameter)
        if gradient.is_sparse:
            raise UnsupportedError(
                f'{self.target.name_of(parameter)}: a sparse gradient with gradients="host"; use '
                "sparse=False, or keep the gradients on the device"
            )
        parameter.grad = None
        first = id(parameter) not in self.sums.filled
        self.sums.filled.add(id(parameter))
        total = self.sums.flat(parameter)
        transfer = self._transfers[parameter.device]
        stays = self._on_device.sums.get(id(parameter))
        if stays is not None:  # a second gradient of it in this backward
            total = stays
        elif self._may_stay and isinstance(transfer, CudaTransfer):
            stays = self._on_device.room_for(parameter, total)
        norms: list[Tensor] | None = None
        if self._is_last:  # take the norm on the way, while the sum is in the cache
            norms = self.norms[(total if stays is None else stays).data_ptr()] = []
        flat = flat_of(gradient.detach(), parameter)
        transfer.put(flat, total, first=first, norms=norms, stays=stays)

    def before_backward(self, window: OpenWindow, *, last: bool) -> bool:
        self._is_last = last
        # Let nothing stay before an optimizer's first step, which allocates its state.
        self._may_stay = (
            last and self._has_stepped and self.sync.ranks == 1 and not self._steps_on_host
        )
        self.norms = {}
        return True

    def backward_made(self) -> None:
        for transfer in self._transfers.values():
            transfer.backward_made()

    # Graphs

    def for_graphs(self, parameters: Sequence[nn.Parameter]) -> GraphSums:
        return GraphSums(self, parameters, self._transfers[parameters[0].device])

    def drained(self) -> HostSums:
        """Return the sums, once every gradient that was handed over is in them."""
        for transfer in self._transfers.values():
            transfer.drain()
        return self.sums

    def _sum(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum in the parameter's shape, wherever it is; None if there is none."""
        here = self._on_device.sums.get(id(parameter))
        return self.sums.shaped(parameter) if here is None else in_shape_of(parameter, here)

    # Close

    def absent(self) -> set[int]:
        return {id(p) for p in self.parameters} - self.sums.filled

    def close(self, window: OpenWindow, normalise: float, hooks: DeferredHooks) -> Closed:
        sums = self.drained()
        if self.sync.ranks > 1:
            self._reduce(sums)
        if self.sync.ranks > 1 or hooks.taken:
            self.norms = {}  # the sums were not final when these were taken
        # A fused step multiplies in float32, and a rounded gradient is multiplied before.
        rounds = self.target.sixteen_bit.rounds
        in_place = any(p.dtype is not torch.float32 and not rounds(p) for p in self.parameters)
        return close_gradients(
            [[SimpleNamespace(grad=self._sum(p)) for p in group] for group in window.groups],
            self.target.optimizers,
            self.options,
            normalise,
            hooks,
            total_norm=self._total_norm,
            in_place=in_place or self._steps_on_host,
            lent=self._lent,
        )

    def _total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over these sums, from the norms that were taken on the way."""
        found = [self.norms.get(gradient.data_ptr()) for gradient in gradients]
        known = [norm for norms in found if norms for norm in norms]
        others = [g for g, norms in zip(gradients, found, strict=True) if not norms]
        total = math.hypot(*read_scalars([*known, total_norm(others)]))
        if not math.isfinite(total):  # squares overflow in float32 where numbers do not
            return total_norm(gradients)
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def _reduce(self, sums: HostSums) -> None:
        """Sum over the ranks, bucket by bucket, on the device where the ranks communicate."""
        for bucket in sums.buckets:
            for parameter in bucket.parameters:
                if id(parameter) not in sums.filled:
                    sums.flat(parameter).zero_()
            bucket.flat.copy_(self.sync.sum_tensor(bucket.flat.to(bucket.device)))
        sums.filled = {id(parameter) for parameter in self.parameters} - self.dropped

    @contextmanager
    def _lent(self, parameter: nn.Parameter) -> Iterator[None]:
        """Lend the sum to the parameter's `.grad`, for the user's own gradient hooks."""
        held = self._sum(parameter)
        if held is None:
            yield
            return
        found = getattr(parameter, "grad_dtype", None)
        parameter.grad_dtype = held.dtype
        parameter.grad = held.to(parameter.device, copy=True)
        try:
            yield
            replaced: Tensor | None = parameter.grad
            if replaced is not None:
                held.copy_(replaced)
        finally:
            parameter.grad = None
            parameter.grad_dtype = found

    def step(self, remaining: float) -> None:
        sums = self.drained()
        rounds = self.target.sixteen_bit.rounds
        way = (
            _ParametersToHost(rounds)
            if self._steps_on_host
            else _SumsToDevice(rounds, remaining, self._on_device.sums)
        )
        for index, optimizer in enumerate(self.target.optimizers):
            buckets = [
                (bucket, parameters)
                for bucket in sums.buckets
                if bucket.optimizer == index
                and (parameters := [p for p in bucket.parameters if id(p) in sums.filled])
            ]
            with in_parts(optimizer):
                for parameters in way.over(optimizer, buckets, sums):
                    rest = 1.0 if rounds(parameters[0]) else remaining
                    with stepping(optimizer, rest), only(optimizer, parameters):
                        optimizer.step()
        self._has_stepped = True

    # State

    def saved(self) -> list[Tensor | None]:
        self.drained()
        held = [self._sum(parameter) for parameter in self.parameters]
        return [None if one is None else one.to("cpu", copy=True) for one in held]

    def load(self, saved: Any) -> None:
        sums = self.drained()
        for parameter, gradient in zip(self.parameters, saved, strict=True):
            if gradient is not None:
                in_shape_of(parameter, sums.flat(parameter)).copy_(gradient)
                sums.filled.add(id(parameter))

    def discard(self) -> None:
        self.drained()
        super().discard()
        self.target.sixteen_bit.end()
        self.norms = {}
        self._on_device.sums.clear()
        self.sums.filled = set()


class SumsOnDevice:
    """Complete sums of one window that stay on their device, in memory that activations have left.

    As the last backward of a window goes on, it frees more memory than its gradients take. A sum
    that is complete there need not leave for the host and come back for the step, as long as it
    does not raise the device's peak.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}
        """The sums by the id of the parameter."""
        self._aside = 0
        self._full = False

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start a window without sums, and compute the memory to leave to its backwards."""
        self.sums.clear()
        self._full = False
        self._aside = 2 * max((p.numel() * max(4, p.element_size()) for p in parameters), default=0)

    def room_for(self, parameter: nn.Parameter, total: Tensor) -> Tensor | None:
        """Allocate device memory for this sum below the highest peak so far; None if it is full."""
        if self._full or total.nbytes < _SMALLEST_TO_STAY:
            return None
        found = torch.cuda.memory_stats(parameter.device)
        needed = found.get("allocated_bytes.all.current", 0) + total.nbytes + self._aside
        if needed > found.get("allocated_bytes.all.peak", 0):  # some allocators do not report it
            return None
        try:
            room = torch.empty(total.shape, dtype=total.dtype, device=parameter.device)
        except torch.OutOfMemoryError:  # the free memory is fragmented
            self._full = True
            return None
        self.sums[id(parameter)] = room
        return room


@dataclass(eq=False, slots=True)
class _Arriving:
    """Gradients of a bucket, and the event after which they are there.

    `rounded_from` is kept until then: its memory must not be used for anything else before.
    """

    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    arrived: torch.cuda.Event | None
    rounded_from: Tensor | None


@dataclass(eq=False)
class _SumsToDevice:
    """Brings the sums of one bucket after the other back to the device.

    A gradient that is to be rounded to 16 bit is multiplied by `factor` first, and rounded once.
    Sums that have `stayed` on the device are taken from there.
    """

    rounds: Callable[[nn.Parameter], bool]
    factor: float
    stayed: dict[int, Tensor]
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def over(
        self, optimizer: torch.optim.Optimizer, buckets: _Buckets, sums: HostSums
    ) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters of one bucket after the other, each with its `.grad`."""
        try:
            for here in one_ahead(buckets, lambda bucket: self._sent(*bucket, sums)):
                parameters = here.parameters
                if here.arrived is not None:
                    torch.cuda.current_stream(parameters[0].device).wait_event(here.arrived)
                for parameter, gradient in zip(parameters, here.gradients, strict=True):
                    _set_gradient(parameter, gradient)
                del here, gradient
                yield parameters
                for parameter in parameters:
                    parameter.grad = None
        finally:
            for stream in self._streams.values():
                stream.synchronize()  # the sums may be overwritten from here on

    def _sent(self, bucket: Bucket, parameters: list[nn.Parameter], sums: HostSums) -> _Arriving:
        """Start the way back of a bucket, in one piece if all of it comes."""
        narrow = parameters[0].dtype if self.rounds(parameters[0]) else None
        flats = {id(p): self.stayed.pop(id(p)) for p in parameters if id(p) in self.stayed}
        if narrow is not None:
            for key, flat in flats.items():
                flats[key] = flat.mul_(self.factor).to(narrow)
        coming = [p for p in parameters if id(p) not in flats]
        wide = arrived = None
        if coming:
            held = [sums.flat(parameter) for parameter in coming]
            rows = [bucket.flat] if len(coming) == len(bucket.parameters) else held
            whole, arrived, wide = self._fetched(rows, coming[0].device, narrow)
            sizes = [one.numel() for one in held]
            flats.update(zip(map(id, coming), whole.split(sizes), strict=True))
        gradients = [in_shape_of(parameter, flats[id(parameter)]) for parameter in parameters]
        return _Arriving(parameters, gradients, arrived, wide)

    def _fetched(
        self, rows: list[Tensor], device: torch.device, narrow: torch.dtype | None
    ) -> tuple[Tensor, torch.cuda.Event | None, Tensor | None]:
        """Return these sums as one row on the device, its event, and what it was rounded from."""
        if device.type != "cuda":
            whole = rows[0] if len(rows) == 1 else torch.cat(rows)
            return (whole if narrow is None else whole.mul(self.factor).to(narrow)), None, None
        current = torch.cuda.current_stream(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        sizes = [row.numel() for row in rows]
        whole = torch.empty(sum(sizes), dtype=rows[0].dtype, device=device)
        small = None if narrow is None else torch.empty_like(whole, dtype=narrow)
        side.wait_stream(current)  # earlier users of this memory must be done
        with torch.cuda.stream(side), torch.no_grad():
            for target, row in zip(whole.split(sizes), rows, strict=True):
                target.copy_(row, non_blocking=True)
            if small is not None:
                small.copy_(whole.mul_(self.factor))
            arrived = side.record_event()
        return (whole, arrived, None) if small is None else (small, arrived, whole)


class _ParametersToHost:
    """Brings parameters to the host, where they are stepped, and back; the state stays there."""

    def __init__(self, rounds: Callable[[nn.Parameter], bool]) -> None:
        self._rounds = rounds
        self._on_device: dict[int, Tensor] = {}

    @torch.no_grad()
    def over(
        self, optimizer: torch.optim.Optimizer, buckets: _Buckets, sums: HostSums
    ) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters of one bucket after the other, on the host with their `.grad`."""
        for parameters, copies, arrived in one_ahead(buckets, lambda bucket: _copied(bucket[1])):
            if arrived is not None:
                arrived.synchronize()
            for parameter, copy in zip(parameters, copies, strict=True):
                _state_to_host(optimizer, parameter)
                gradient = sums.flat(parameter)
                if self._rounds(parameter):
                    gradient = gradient.to(parameter.dtype)
                if copy is not None:
                    self._on_device[id(parameter)] = parameter.data
                    parameter.data = in_shape_of(parameter, copy)
                _set_gradient(parameter, in_shape_of(parameter, gradient))
            try:
                yield parameters
            finally:
                for parameter in parameters:
                    parameter.grad = None
                    on_device = self._on_device.pop(id(parameter), None)
                    if on_device is not None:
                        stepped, parameter.data = parameter.data, on_device
                        parameter.data.copy_(stepped, non_blocking=True)


def _set_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    if getattr(parameter, "grad_dtype", None) is not gradient.dtype:
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def _state_to_host(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Move state that is on the device (from a checkpoint, or from steps made there) for good."""
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            state[name] = value.cpu()


def _copied(
    parameters: list[nn.Parameter],
) -> tuple[list[nn.Parameter], list[Tensor | None], torch.cuda.Event | None]:
    """Start to copy parameters to the host; None for one that is there already."""
    device = parameters[0].device
    if device.type != "cuda":
        return parameters, [None] * len(parameters), None
    copies: list[Tensor | None] = []
    for parameter in parameters:
        copy = torch.empty(parameter.numel(), dtype=parameter.dtype, pin_memory=True)
        copies.append(copy.copy_(flat_of(parameter.data, parameter), non_blocking=True))
    return parameters, copies, torch.cuda.current_stream(device).record_event()
