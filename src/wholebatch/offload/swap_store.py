"""Gradients take the place of Adam's moments, which wait on the host while a window is open.

A plain window needs the gradients from the first backward to the step, and the optimizer's state in
the step alone, so both can use the same memory of the device. When a window opens, the first moment
of every parameter goes to the host, and the gradients add up where it was. At the close the moments
come back bucket by bucket, the optimizer steps, and the new moments take their place again. The
same gradients reach the same step as in the plain window, so if autograd adds in both, as on a CPU,
the update has the same bits. Each moment travels once out and once back in a window, however many
micro-batches it has.

The sums of 16-bit parameters are float32, as large as both moments together: there both moments
leave, and lie side by side to make room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import Closed, CloseOptions, DeferredHooks
from wholebatch.core.gradient_store import DeviceStore
from wholebatch.core.optimizer_step import stepping
from wholebatch.core.precision import round_gradient
from wholebatch.distributed import Sync
from wholebatch.errors import UnsupportedError
from wholebatch.offload.adam_accumulation import adam_state_of, check_adam
from wholebatch.offload.parameter_buckets import (
    Bucket,
    HostSums,
    flat_of,
    in_parts,
    in_shape_of,
    one_ahead,
    only,
    sum_over_ranks,
)

if TYPE_CHECKING:
    from wholebatch.core.model_and_optimizer import Target
    from wholebatch.core.window import OpenWindow


@dataclass(eq=False, slots=True)
class _Swapped:
    """One parameter's moments: where they belong, where they wait, and the room that they leave."""

    bucket: int
    state: dict[str, Any]
    moments: dict[str, Tensor]
    host: Tensor
    room: Tensor
    taken: bool = False


class SwapStore(DeviceStore):
    """Gradients in `.grad`, which is memory of the optimizer's state; that is on the host."""

    option = 'gradients="swap"'
    steps_on_all = False
    in_grad = False  # the window's last backward would make a copy of all to reduce them
    only_eager = 'with gradients="swap" they change places by hooks that only eager code calls'

    def __init__(self, target: Target, options: CloseOptions, sync: Sync) -> None:
        super().__init__(target, options, sync)
        self._sums = HostSums([])  # memory of the host for the moments, in buckets
        self._swapped: dict[int, _Swapped] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._gone: dict[int, torch.cuda.Event] = {}  # by bucket: its moments are on the host

    @property
    def host_bytes(self) -> int:
        """Host memory of the waiting moments."""
        return self._sums.bytes

    # Open window

    def begin(self, window: OpenWindow) -> None:
        super().begin(window)
        if not self._sums.is_for(window.inputs):
            self._sums = HostSums([])  # first, so that two sets never exist at once
            self._sums = HostSums.of(window.inputs, self.target.optimizers)
        self._send(self._sums)
        self.hook(self._made)

    @torch.no_grad()
    def _send(self, sums: HostSums) -> None:
        """Send the moments to the host, where the optimizer's state is from now on."""
        groups = {
            id(p): (optimizer, group)
            for optimizer in self.target.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for number in reversed(range(len(sums.buckets))):  # the order in which backward needs room
            bucket = sums.buckets[number]
            for parameter in bucket.parameters:
                state = adam_state_of(*groups[id(parameter)], parameter)
                moments, room = _room(parameter, state)
                self._swapped[id(parameter)] = _Swapped(
                    number, state, moments, sums.flat(parameter), room
                )
            side = self._side(bucket.device)
            with torch.cuda.stream(side):
                for parameter in bucket.parameters:
                    place = self._swapped[id(parameter)]
                    place.host.copy_(flat_of(place.room, parameter), non_blocking=True)
                    place.state.update(_moments_in(parameter, place.host, place.moments))
                if side is not None:
                    self._gone[number] = side.record_event()

    def _side(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return a stream for transfers, which waits for all work of the device so far."""
        if device.type != "cuda":
            return None
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        self._sides[device].wait_stream(torch.cuda.current_stream(device))
        return self._sides[device]

    @torch.no_grad()
    def _made(self, parameter: Tensor) -> None:
        """Move a first gradient into its room, where later ones are added to it."""
        gradient = parameter.grad
        place = self._swapped[id(parameter)]
        if gradient is None or place.taken:
            return
        if gradient.is_sparse:
            raise UnsupportedError(
                'a sparse gradient with gradients="swap"; use sparse=False, or gradients="device"'
            )
        self._take(place, parameter.device)
        parameter.grad = place.room.copy_(gradient)
        self.unhook(parameter)

    def _take(self, place: _Swapped, device: torch.device) -> None:
        """Let gradients use the room, once its moments are on the host."""
        gone = self._gone.get(place.bucket)
        if gone is not None:
            torch.cuda.current_stream(device).wait_event(gone)
        place.taken = True

    # Close

    def absent(self) -> set[int]:
        return {id(parameter) for parameter in self.parameters if parameter.grad is None}

    def close(self, window: OpenWindow, normalise: float, hooks: DeferredHooks) -> Closed:
        if self.sync.ranks > 1:
            self._reduce()
        return super().close(window, normalise, hooks)

    @torch.no_grad()
    def _reduce(self) -> None:
        """Sum over the ranks, bucket by bucket."""
        for bucket in self._sums.buckets:
            some = [p for p in bucket.parameters if id(p) not in self.dropped]
            if not some:
                continue
            for parameter in some:
                if parameter.grad is None:  # another rank has one
                    place = self._swapped[id(parameter)]
                    self._take(place, parameter.device)
                    parameter.grad = place.room.zero_()
            rows = [flat_of(p.grad, p) for p in some if p.grad is not None]
            for row, summed in zip(rows, sum_over_ranks(self.sync, rows), strict=True):
                row.copy_(summed)

    def step(self, remaining: float) -> None:
        for index, optimizer in enumerate(self.target.optimizers):
            with in_parts(optimizer):
                for parameters, back in self._returning(index):
                    for parameter in parameters:
                        if self.target.sixteen_bit.rounds(parameter):
                            round_gradient(parameter)
                    with stepping(optimizer, remaining), only(optimizer, parameters):
                        optimizer.step()
                    self._settle(parameters, back)
                    del back  # before the next but one is sent

    def _returning(self, optimizer: int) -> Iterator[tuple[list[nn.Parameter], list[Tensor]]]:
        """Yield, bucket by bucket, the parameters with a gradient, and their moments on the device.

        While the optimizer steps on one bucket, the next one travels.
        """
        used = [
            bucket
            for bucket in self._sums.buckets
            if bucket.optimizer == optimizer and any(p.grad is not None for p in bucket.parameters)
        ]
        for bucket, flat, arrived in one_ahead(used, self._sent_back):
            if arrived is not None:
                torch.cuda.current_stream(flat.device).wait_event(arrived)
            some = [
                (p, piece)
                for p, piece in zip(bucket.parameters, flat.split(bucket.sizes), strict=True)
                if p.grad is not None
            ]
            for parameter, piece in some:
                place = self._swapped[id(parameter)]
                place.state.update(_moments_in(parameter, piece, place.moments))
            del flat, piece
            yield [parameter for parameter, _ in some], [piece for _, piece in some]
            del some

    @torch.no_grad()
    def _sent_back(self, bucket: Bucket) -> tuple[Bucket, Tensor, torch.cuda.Event | None]:
        """Start the way back of a bucket's moments."""
        device = bucket.device
        if device.type != "cuda":
            return bucket, bucket.flat.clone(), None
        flat = torch.empty(sum(bucket.sizes), dtype=bucket.flat.dtype, device=device)
        side = self._side(device)  # it waits for earlier users of this memory
        assert side is not None
        with torch.cuda.stream(side):
            flat.copy_(bucket.flat, non_blocking=True)
            return bucket, flat, side.record_event()

    @torch.no_grad()
    def _settle(self, parameters: list[nn.Parameter], back: list[Tensor]) -> None:
        """Put the new moments where they were: the gradients there are used."""
        for parameter, new in zip(parameters, back, strict=True):
            place = self._swapped.pop(id(parameter))
            parameter.grad = None
            flat_of(place.room, parameter).copy_(new)
            place.state.update(place.moments)

    # State

    def saved(self) -> list[Tensor | None]:
        for side in self._sides.values():
            side.synchronize()  # the optimizer's state, which is saved too, must be on the host
        return super().saved()

    def load(self, saved: Any) -> None:
        super().load(saved)
        for parameter in self.parameters:
            self._made(parameter)

    @torch.no_grad()
    def discard(self) -> None:
        for parameter in self.parameters:  # without an update, restore the moments
            place = self._swapped.pop(id(parameter), None)
            if place is None:
                continue
            if place.taken:
                parameter.grad = None
                flat_of(place.room, parameter).copy_(place.host, non_blocking=True)
            place.state.update(place.moments)
        for device, side in self._sides.items():
            side.wait_stream(torch.cuda.current_stream(device))  # before moments leave again
        self._swapped, self._gone = {}, {}
        super().discard()


def _room(parameter: nn.Parameter, state: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the moments that leave, and their memory as the gradient of this parameter."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    if dtype is parameter.dtype:
        first = state["exp_avg"]
        if first.stride() != parameter.stride() or first.dtype is not dtype:
            first = state["exp_avg"] = torch.empty_like(parameter, requires_grad=False).copy_(first)
        return {"exp_avg": first}, first
    first, second = state["exp_avg"], state["exp_avg_sq"]
    count = parameter.numel()
    side_by_side = (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and (first.storage_offset(), second.storage_offset()) == (0, count)
        and first.stride() == second.stride() == parameter.stride()
    )
    if not side_by_side:
        both = torch.empty(2 * count, dtype=parameter.dtype, device=parameter.device)
        moved = [in_shape_of(parameter, half) for half in both.split(count)]
        for new, name in zip(moved, ("exp_avg", "exp_avg_sq"), strict=True):
            state[name] = new.copy_(state[name])
        first, second = moved
    both = first.as_strided((2 * count,), (1,), 0)
    return {"exp_avg": first, "exp_avg_sq": second}, in_shape_of(parameter, both.view(dtype))


def _moments_in(
    parameter: nn.Parameter, flat: Tensor, names: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """View a row of memory as the moments that it holds."""
    rows = flat.view(parameter.dtype).split(parameter.numel()) if parameter.numel() else [flat]
    return {name: in_shape_of(parameter, row) for name, row in zip(names, rows, strict=False)}


def check_swap(target: Target) -> None:
    """Refuse optimizers that do not have Adam's moments, with the reason."""
    for optimizer in target.optimizers:
        check_adam(optimizer, 'gradients="swap"', "take the place of")
