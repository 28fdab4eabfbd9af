"""Adam's moments wait on the host, and come to the device for the step alone.

The first moment of every parameter lives in pinned host memory, and the gradients take its place on
the device. The sums of 16-bit parameters are as large as both moments: there both wait. At the
close the moments come bucket by bucket, the optimizer steps, and the new moments go back, while the
next bucket comes. The same step sees the gradients in `.grad` as in the plain window, so the update
has its bits.

Recorded micro-steps keep their memory, so the memory of the buckets at the close is free in them.
There the buckets that were stepped on last stay on the device, and are the first at the next close.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

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
from wholebatch.window.close import Closed, CloseOptions, DeferredHooks, stepping
from wholebatch.window.gradient_store import DeviceStore
from wholebatch.window.precision import SIXTEEN_BIT, round_gradient

if TYPE_CHECKING:
    from wholebatch.window.model_and_optimizer import Target
    from wholebatch.window.window import OpenWindow

_AT_ONCE = 3
"""Buckets on the device at once: one comes, one is stepped on, one leaves."""


class SwapStore(DeviceStore):
    """Gradients in `.grad`; the moments that they replace are on the host."""

    option = 'gradients="swap"'
    steps_on_all = False
    in_grad = False  # the window's last backward would make a copy of all to reduce them
    closes_ahead = False

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
        # Those that have stayed come first, and the largest of the others comes last, to stay.
        places = {id(one): self._place(one) for one in used}
        new = [one for one in used if places[id(one)] < 0]
        largest = max(new, key=lambda one: one.flat.nbytes, default=None)
        used.sort(key=lambda one: (places[id(one)] < 0, places[id(one)], one is largest))
        stay = used[-_AT_ONCE:] if self._records and len(self.target.optimizers) == 1 else []
        rows = one_ahead(used, lambda one: (one, self._ways[one.device].fetch(one.flat)))
        for bucket, row in rows:
            way, stays = self._ways[bucket.device], any(bucket is one for one in stay)
            parameters = [p for p in bucket.parameters if p.grad is not None]
            for parameter in parameters:
                if self.target.sixteen_bit.rounds(parameter):
                    round_gradient(parameter)
            way.wait(row.arrived)
            with (
                self._moments_in(optimizer, bucket, row.flat, stays=stays),
                stepping(optimizer, remaining),
                only(optimizer, parameters),
            ):
                optimizer.step()
            row.stays = stays
            way.leave(row)
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


@dataclass(eq=False, slots=True)
class _Row:
    """A row of moments on a device, and the events after which it has arrived and left."""

    host: Tensor
    flat: Tensor
    arrived: torch.cuda.Event | None
    left: torch.cuda.Event | None = None
    stays: bool = False


class _Way:
    """The way of moments to a device for the step, and back; few rows are there at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )
        self.rows: deque[_Row] = deque()

    def fetch(self, host: Tensor) -> _Row:
        """Start the way of a row to the device, in memory that an earlier one has left."""
        for row in self.rows:
            if row.host is host:
                return row  # it has stayed
        if len(self.rows) == _AT_ONCE:
            self.wait(self.rows.popleft().left)
        flat = torch.empty_like(host, device=self._device)
        self.rows.append(_Row(host, flat, self._copy(self._in, flat, host)))
        return self.rows[-1]

    def leave(self, row: _Row) -> None:
        """Send a row back to the host, unless it stays."""
        if not row.stays:
            row.left = self._copy(self._out, row.host, row.flat)

    @torch.no_grad()
    def _copy(
        self, stream: torch.cuda.Stream | None, to: Tensor, row: Tensor
    ) -> torch.cuda.Event | None:
        """Copy beside the device's work, after what it has been given so far."""
        if stream is None:
            to.copy_(row)
            return None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            to.copy_(row, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the device wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def end(self) -> None:
        """Wait until all rows but those that stay are on the host again."""
        self.rows = deque(row for row in self.rows if row.stays)
        if self._in is not None and self._out is not None:
            # The device waits for rows that still come; the host may prepare the next window.
            torch.cuda.current_stream(self._device).wait_stream(self._in)
            self._out.synchronize()


def _moments_of(parameter: nn.Parameter, flat: Tensor) -> dict[str, Tensor]:
    """View a row of memory as the moments that wait in it: both of a 16-bit parameter."""
    if parameter.dtype not in SIXTEEN_BIT:
        return {"exp_avg": in_shape_of(parameter, flat)}
    first, second = flat.view(parameter.dtype).tensor_split(2)
    return {"exp_avg": in_shape_of(parameter, first), "exp_avg_sq": in_shape_of(parameter, second)}


def check_swap(target: Target) -> None:
    """Refuse optimizers that do not have Adam's moments, with the reason."""
    for optimizer in target.optimizers:
        check_adam(optimizer, 'gradients="swap"', "take the place of")
