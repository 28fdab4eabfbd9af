"""Gradients take the place of Adam's moments, which wait on the host while a window is open.

A plain window needs the gradients from the first backward to the step, and the optimizer's state in
the step alone. So both can use the same memory of the device: when a window opens, the first moment
of every parameter goes to the host, and the gradients add up where it was; at the close the moments
come back bucket by bucket, the optimizer steps, and the new moments take their place again. The
same gradients reach the same step as in the plain window, so where autograd adds in both, as on a
CPU, the update has the same bits. What travels is each moment once out and once back in a window,
however many micro-batches it has.

The sums of 16-bit parameters are float32, as large as both of their moments together: there both
go, and lie side by side to make room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import Closed, CloseOptions, DeferredHooks
from wholebatch.core.device_store import DeviceStore
from wholebatch.core.optimizer_step import stepping
from wholebatch.distributed import Sync
from wholebatch.errors import UnsupportedError
from wholebatch.offload.adam_state import check_adam, state_of
from wholebatch.offload.host_sums import Bucket, Sums, flat_of, like
from wholebatch.offload.partial_steps import in_parts, only

if TYPE_CHECKING:
    from wholebatch.core.model_and_optimizer import Target

__all__ = ["SwapStore", "check_swap"]


@dataclass(eq=False, slots=True)
class _Place:
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
        self._sums: Sums | None = None  # the host's memory, in buckets
        self._places: dict[int, _Place] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._gone: dict[int, torch.cuda.Event] = {}  # by bucket: its moments are on the host
        self._nowhere: set[int] = set()

    @property
    def host_bytes(self) -> int:
        """Host memory that the waiting moments take."""
        return 0 if self._sums is None else self._sums.bytes

    # ----------------------------------------------------------------- window

    def begin(
        self, parameters: list[nn.Parameter], known: Mapping[str, float] | None = None
    ) -> None:
        super().begin(parameters, known)
        if self._sums is None or not self._sums.is_for(parameters):
            self._sums = None  # first, so that two sets never exist at once
            self._sums = Sums.of(parameters, self.target.optimizers)
        self._send(self._sums)
        self.hook(self._made)

    @torch.no_grad()
    def _send(self, sums: Sums) -> None:
        """The moments leave for the host, and the optimizer's state is there from now on."""
        groups = {
            id(p): (optimizer, group)
            for optimizer in self.target.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for number in reversed(range(len(sums.buckets))):  # as backward asks for their room
            bucket = sums.buckets[number]
            for parameter in bucket.parameters:
                state = state_of(*groups[id(parameter)], parameter)
                moments, room = _room(parameter, state)
                host = sums.flat(parameter)
                self._places[id(parameter)] = _Place(number, state, moments, host, room)
            side = self._side(bucket.parameters[0].device)
            with torch.cuda.stream(side):
                for parameter in bucket.parameters:
                    place = self._places[id(parameter)]
                    place.host.copy_(flat_of(place.room, parameter), non_blocking=True)
                    place.state.update(_moments_in(parameter, place.host, place.moments))
                if side is not None:
                    self._gone[number] = side.record_event()

    def _side(self, device: torch.device) -> torch.cuda.Stream | None:
        """A stream for what travels, after all that the device has been asked for so far."""
        if device.type != "cuda":
            return None
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        self._sides[device].wait_stream(torch.cuda.current_stream(device))
        return self._sides[device]

    @torch.no_grad()
    def _made(self, parameter: Tensor) -> None:
        """A backward has made a gradient: it moves into its room, where later ones add up."""
        gradient = parameter.grad
        place = self._places[id(parameter)]
        if gradient is None or place.taken:
            return
        if gradient.is_sparse:
            raise UnsupportedError(
                'a sparse gradient with gradients="swap"; use sparse=False, or gradients="device"'
            )
        self._take(place, parameter.device)
        parameter.grad = place.room.copy_(gradient)
        self.look_away(parameter)

    def _take(self, place: _Place, device: torch.device) -> None:
        """The room may be written to: what was in it is on the host."""
        gone = self._gone.get(place.bucket)
        if gone is not None:
            torch.cuda.current_stream(device).wait_event(gone)
        place.taken = True

    # ------------------------------------------------------------------ close

    def absent(self) -> set[int]:
        return {id(parameter) for parameter in self.parameters if parameter.grad is None}

    def drop(self, parameter: nn.Parameter) -> None:
        self._nowhere.add(id(parameter))

    def close(
        self, groups: Sequence[Sequence[nn.Parameter]], normalise: float, hooks: DeferredHooks
    ) -> Closed:
        if self.sync.ranks > 1:
            self._reduce()
        return super().close(groups, normalise, hooks)

    @torch.no_grad()
    def _reduce(self) -> None:
        """Bucket by bucket, once per window."""
        assert self._sums is not None
        for bucket in self._sums.buckets:
            some = [p for p in bucket.parameters if id(p) not in self._nowhere]
            if not some:
                continue
            for parameter in some:
                if parameter.grad is None:  # another rank has one
                    place = self._places[id(parameter)]
                    self._take(place, parameter.device)
                    parameter.grad = place.room.zero_()
            rows = [flat_of(p.grad, p) for p in some if p.grad is not None]
            flat = torch.cat(rows)
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            summed = self.sync.sum_tensor(real).view_as(real)
            flat = torch.view_as_complex(summed) if flat.is_complex() else summed
            for row, piece in zip(rows, flat.split([row.numel() for row in rows]), strict=True):
                row.copy_(piece)

    def step(self, remaining: float) -> None:
        for index, optimizer in enumerate(self.target.optimizers):
            with in_parts(optimizer):
                for parameters, back in self._returning(index):
                    self._round(parameters)
                    with stepping(optimizer, remaining), only(optimizer, parameters):
                        optimizer.step()
                    self._settle(parameters, back)
                    del back  # before the next but one is sent

    def _returning(self, optimizer: int) -> Iterator[tuple[list[nn.Parameter], list[Tensor]]]:
        """Bucket by bucket the parameters that have a gradient, with their moments on the device.

        While the optimizer steps on one bucket, the next one travels.
        """
        assert self._sums is not None
        ahead: list[tuple[Bucket, Tensor, torch.cuda.Event | None]] = []
        used = [
            bucket
            for bucket in self._sums.buckets
            if bucket.optimizer == optimizer and any(p.grad is not None for p in bucket.parameters)
        ]
        for number in range(len(used) + 1):
            if number < len(used):
                ahead.append(self._sent_back(used[number]))
            if number == 0:
                continue
            bucket, flat, arrived = ahead.pop(0)
            if arrived is not None:
                torch.cuda.current_stream(flat.device).wait_event(arrived)
            pieces = flat.split([p.numel() for p in bucket.parameters])
            some = [
                (p, piece)
                for p, piece in zip(bucket.parameters, pieces, strict=True)
                if p.grad is not None
            ]
            for parameter, piece in some:
                place = self._places[id(parameter)]
                place.state.update(_moments_in(parameter, piece, place.moments))
            del flat, pieces
            yield [parameter for parameter, _ in some], [piece for _, piece in some]
            del some

    @torch.no_grad()
    def _sent_back(self, bucket: Bucket) -> tuple[Bucket, Tensor, torch.cuda.Event | None]:
        device = bucket.parameters[0].device
        if device.type != "cuda":
            return bucket, bucket.flat.clone(), None
        flat = torch.empty(bucket.numel, dtype=bucket.flat.dtype, device=device)
        side = self._side(device)  # what the memory was used for before must be over
        assert side is not None
        with torch.cuda.stream(side):
            flat.copy_(bucket.flat, non_blocking=True)
            return bucket, flat, side.record_event()

    def _round(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and self.target.sixteen_bit.rounds(parameter):
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
                parameter.grad = gradient.to(parameter.dtype)

    @torch.no_grad()
    def _settle(self, parameters: list[nn.Parameter], back: list[Tensor]) -> None:
        """The gradients are used: the new moments go where they were."""
        for parameter, new in zip(parameters, back, strict=True):
            place = self._places.pop(id(parameter))
            parameter.grad = None
            flat_of(place.room, parameter).copy_(new)
            place.state.update(place.moments)

    # ------------------------------------------------------------------ state

    def saved(self) -> list[Tensor | None]:
        for side in self._sides.values():
            side.synchronize()  # the optimizer's own state, which is saved too, has arrived
        return super().saved()

    def load(self, saved: Any) -> None:
        super().load(saved)
        for parameter in self.parameters:
            self._made(parameter)

    @torch.no_grad()
    def discard(self) -> None:
        for parameter in self.parameters:  # those without an update get back what they had
            place = self._places.pop(id(parameter), None)
            if place is None:
                continue
            if place.taken:
                parameter.grad = None
                flat_of(place.room, parameter).copy_(place.host, non_blocking=True)
            place.state.update(place.moments)
        for device, side in self._sides.items():
            side.wait_stream(torch.cuda.current_stream(device))  # before the next leave
        self._places, self._gone, self._nowhere = {}, {}, set()
        super().discard()


def _room(parameter: nn.Parameter, state: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """The moments that leave, and their memory as it holds a gradient of this parameter."""
    dtype = parameter.grad_dtype or parameter.dtype
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
        moved = [like(parameter, half) for half in both.split(count)]
        for new, name in zip(moved, ("exp_avg", "exp_avg_sq"), strict=True):
            state[name] = new.copy_(state[name])
        first, second = moved
    both = first.as_strided((2 * count,), (1,), 0)
    return {"exp_avg": first, "exp_avg_sq": second}, like(parameter, both.view(dtype))


def _moments_in(
    parameter: nn.Parameter, flat: Tensor, names: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A row of memory as the moments that it holds."""
    rows = flat.view(parameter.dtype).split(parameter.numel()) if parameter.numel() else [flat]
    return {name: like(parameter, row) for name, row in zip(names, rows, strict=False)}


def check_swap(target: Target) -> None:
    """Refuse optimizers that do not have Adam's moments, with the reason."""
    for optimizer in target.optimizers:
        check_adam(optimizer, 'gradients="swap"', "take the place of")
