"""Adam's moments wait on the host, and come to the device for the step alone.

A window needs the gradients from the first backward to the step, and the optimizer's state in the
step alone. So the first moment of every parameter lives in pinned host memory, and the gradients
take its place on the device. At the close the moments come bucket by bucket, the optimizer steps,
and the new moments go back, while the next bucket comes: the link works in both directions at once.
The gradients are in `.grad`, and the same step sees them as in the plain window, so every way of
running a micro-step works, and the update has the bits of the plain window. Each moment travels
once in and once out for each window, however many micro-batches it has.

Recorded micro-steps keep their memory, so the memory of the buckets at the close is free in them.
There the buckets that were stepped on last stay on the device, and are the first at the next close.

The sums of 16-bit parameters are float32, as large as both moments together: there both wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wholebatch.core.close import Closed, CloseOptions, DeferredHooks
from wholebatch.core.gradient_store import DeviceStore
from wholebatch.core.optimizer_step import stepping
from wholebatch.core.precision import SIXTEEN_BIT, round_gradient
from wholebatch.distributed import Sync
from wholebatch.offload.adam_accumulation import adam_state_of, check_adam
from wholebatch.offload.parameter_buckets import (
    Bucket,
    HostSums,
    in_parts,
    in_shape_of,
    one_ahead,
    only,
)

if TYPE_CHECKING:
    from wholebatch.core.model_and_optimizer import Target
    from wholebatch.core.window import OpenWindow

_AT_ONCE = 3
"""Buckets on the device at once: one comes, one is stepped on, one leaves."""


class SwapStore(DeviceStore):
    """Gradients in `.grad`; the moments that they replace are on the host."""

    option = 'gradients="swap"'
    steps_on_all = False
    in_grad = False  # the window's last backward would make a copy of all to reduce them

    def __init__(self, target: Target, options: CloseOptions, sync: Sync) -> None:
        super().__init__(target, options, sync)
        self._sums = HostSums([])  # memory of the host for the moments, in buckets
        self._waiting: dict[int, dict[str, Tensor]] = {}  # moments between steps, by parameter
        self._ways: dict[torch.device, _Way] = {}
        self._records = False

    @property
    def host_bytes(self) -> int:
        """Host memory of the waiting moments."""
        return self._sums.bytes

    # Open window

    def begin(self, window: OpenWindow) -> None:
        if not self._sums.is_for(window.inputs):
            self._sums = HostSums.of(window.inputs, self.target.optimizers)
            self._waiting, self._ways = {}, {}
        self._send_away(self._sums)
        super().begin(window)

    @torch.no_grad()
    def _send_away(self, sums: HostSums) -> None:
        """Move moments to their place, which is not `state`: new ones, or those of a checkpoint."""
        groups = {
            id(p): (optimizer, group)
            for optimizer in self.target.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for parameter in (p for bucket in sums.buckets for p in bucket.parameters):
            state = adam_state_of(*groups[id(parameter)], parameter)
            waiting = self._waiting.get(id(parameter))
            if waiting is None:
                waiting = _moments_of(parameter, sums.flat(parameter))
                self._waiting[id(parameter)] = waiting
            for name, place in waiting.items():
                if state[name] is not place:
                    state[name] = place.copy_(state[name])

    def for_graphs(self, parameters: Sequence[nn.Parameter]) -> None:
        self._records = True

    # Close

    def absent(self) -> set[int]:
        return {id(parameter) for parameter in self.parameters if parameter.grad is None}

    def close(self, window: OpenWindow, normalise: float, hooks: DeferredHooks) -> Closed:
        for bucket in self._sums.buckets if self.sync.ranks > 1 else ():
            # One bucket at a time: a copy of all gradients would not fit.
            self.sync.reduce_now([p for p in bucket.parameters if id(p) not in self.dropped])
        return super().close(window, normalise, hooks)

    def step(self, remaining: float) -> None:
        for device in {one.device for one in self._sums.buckets} - self._ways.keys():
            self._ways[device] = _Way(device)
        try:
            for index, optimizer in enumerate(self.target.optimizers):
                with in_parts(optimizer):
                    self._step(index, optimizer, remaining)
        finally:
            for way in self._ways.values():
                way.end()  # the optimizer's state may be read from here on

    def _step(self, index: int, optimizer: torch.optim.Optimizer, remaining: float) -> None:
        """Step on one bucket after the other, while the next one comes and the last one leaves."""
        used = [
            bucket
            for bucket in self._sums.buckets
            if bucket.optimizer == index
            and (self._place(bucket) >= 0 or any(p.grad is not None for p in bucket.parameters))
        ]
        # The largest are the last, and stay.
        used.sort(key=lambda one: (self._place(one) < 0, self._place(one), one.flat.nbytes))
        stay = used[-_AT_ONCE:] if self._records and len(self.target.optimizers) == 1 else []
        rows = one_ahead(used, lambda one: (one, self._ways[one.device].fetch(one.flat)))
        for bucket, row in rows:
            parameters = [p for p in bucket.parameters if p.grad is not None]
            for parameter in parameters:
                if self.target.sixteen_bit.rounds(parameter):
                    round_gradient(parameter)
            stays = any(bucket is one for one in stay)
            with (
                self._moments_in(optimizer, bucket, row.arrived(), stays=stays),
                stepping(optimizer, remaining),
                only(optimizer, parameters),
            ):
                optimizer.step()
            row.leave(stays=stays)
            for parameter in parameters:
                parameter.grad = None

    def _place(self, bucket: Bucket) -> int:
        """Return the place of a bucket among those that have stayed on its device, or -1."""
        rows = self._ways[bucket.device].rows
        return next((i for i, row in enumerate(rows) if row.host is bucket.flat), -1)

    @contextmanager
    def _moments_in(
        self, optimizer: torch.optim.Optimizer, bucket: Bucket, flat: Tensor, *, stays: bool
    ) -> Iterator[None]:
        """Let the optimizer find the moments of a bucket in this row, afterwards too if it stays.

        If the step fails, they are where they were before.
        """
        pieces = zip(bucket.parameters, flat.split(bucket.sizes), strict=True)
        here = {parameter: _moments_of(parameter, piece) for parameter, piece in pieces}
        for parameter, moments in here.items():
            optimizer.state[parameter].update(moments)
        try:
            yield
            for parameter, moments in here.items():
                on_host = _moments_of(parameter, self._sums.flat(parameter))
                self._waiting[id(parameter)] = moments if stays else on_host
        finally:
            for parameter in here:
                optimizer.state[parameter].update(self._waiting[id(parameter)])


class _Way:
    """The way of moments to a device for the step, and back; few rows are there at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.rows: deque[_Row] = deque()

    @torch.no_grad()
    def fetch(self, host: Tensor) -> _Row:
        """Start the way of a row to the device, in memory that an earlier one has left."""
        for row in self.rows:
            if row.host is host:
                return row  # it has stayed
        if len(self.rows) == _AT_ONCE:
            left = self.rows.popleft().left
            if left is not None:
                torch.cuda.current_stream(self._device).wait_event(left)
        row = _Row(host, torch.empty_like(host, device=self._device), self._streams)
        self.rows.append(row)
        return row

    def end(self) -> None:
        """Wait until all rows but those that stay are on the host again."""
        self.rows = deque(row for row in self.rows if row.stays)
        for stream in self._streams or ():
            stream.synchronize()


class _Row:
    """A row of moments on its device."""

    def __init__(
        self,
        host: Tensor,
        flat: Tensor,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None,
    ) -> None:
        self.host, self._flat, self._streams = host, flat, streams
        self._arrived: torch.cuda.Event | None = None
        self.left: torch.cuda.Event | None = None
        self.stays = False
        if streams is None:
            flat.copy_(host)
            return
        streams[0].wait_stream(torch.cuda.current_stream(flat.device))  # users of this memory
        with torch.cuda.stream(streams[0]):
            flat.copy_(host, non_blocking=True)
            self._arrived = streams[0].record_event()

    def arrived(self) -> Tensor:
        """Return the row, which is there for all that is launched from now on."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._flat.device).wait_event(self._arrived)
        return self._flat

    @torch.no_grad()
    def leave(self, *, stays: bool) -> None:
        """Send the row back to the host, unless it stays."""
        self.stays = stays
        if stays:
            return
        if self._streams is None:
            self.host.copy_(self._flat)
            return
        away = self._streams[1]
        away.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(away):
            self.host.copy_(self._flat, non_blocking=True)
            self.left = away.record_event()


def _moments_of(parameter: nn.Parameter, flat: Tensor) -> dict[str, Tensor]:
    """View a row of memory as the moments that wait in it: both of a 16-bit parameter."""
    if parameter.dtype not in SIXTEEN_BIT:
        return {"exp_avg": in_shape_of(parameter, flat)}
    first, second = flat.view(parameter.dtype).tensor_split(2)
    return {
        "exp_avg": in_shape_of(parameter, first),
        "exp_avg_sq": in_shape_of(parameter, second),
    }


def check_swap(target: Target) -> None:
    """Refuse optimizers that do not have Adam's moments, with the reason."""
    for optimizer in target.optimizers:
        check_adam(optimizer, 'gradients="swap"', "take the place of")
