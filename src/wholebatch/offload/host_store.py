"""Gradients leave the device as soon as they are made, and are summed on the host.

Hooks hand each micro-batch's gradient of a parameter over (to `link`, or to `pipe` on a CPU) and
free it, so that the device never holds more than a few of them. At the close the sums are reduced,
normalised and clipped where they are; then they come back bucket by bucket, and the optimizer steps
on each bucket's parameters. What the last backward of a window completes need not leave, where its
activations have left room on the device (`staying`).
With `optimizer_on="host"` the parameters of a bucket come to the host instead, and the optimizer's
state stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.core.close import Closed, CloseOptions, close_gradients
from wholebatch.core.gradient_hooks import DeferredHooks
from wholebatch.core.gradient_store import Numbers, Store
from wholebatch.core.optimizer_step import stepping
from wholebatch.distributed import Sync
from wholebatch.errors import UnsupportedError
from wholebatch.offload.host_sums import Bucket, Sums, flat_of, like, on_host, total_norm
from wholebatch.offload.partial_steps import in_parts, only
from wholebatch.offload.transfer_to_host import Link, Pipe

if TYPE_CHECKING:
    from wholebatch.core.model_and_optimizer import Target

__all__ = ["HostStep", "HostStore", "Returns", "Staying"]


def _way(device: torch.device, nbytes: int) -> Pipe | Link:
    """How gradients of this device reach their sums."""
    return Link(device, nbytes) if device.type == "cuda" else Pipe(nbytes)


class _Holder:
    """A sum, as the close reads it."""

    def __init__(self, gradient: Tensor | None) -> None:
        self.grad = gradient


class HostStore(Store):
    """Sums on the host, in float32 or better; nothing of the size of the gradients elsewhere."""

    option = 'gradients="host"'
    in_grad = False
    only_eager = 'with gradients="host" they leave by hooks that only eager code calls'

    def __init__(
        self, target: Target, options: CloseOptions, sync: Sync, *, steps_on_host: bool = False
    ) -> None:
        super().__init__(target, options, sync)
        self._steps_on_host = steps_on_host
        self.counts_changes = not steps_on_host  # there the parameters' memory is changed
        self._sums: Sums | None = None
        self._pipes: dict[torch.device, Pipe | Link] = {}
        self._is_last = False
        self._may_stay = self._has_stepped = False
        self._staying = Staying()
        self._norms: dict[int, list[Tensor]] = {}  # of sums that are complete, by their place
        self._nowhere: set[int] = set()  # parameters without a gradient on any rank

    @property
    def bytes_out(self) -> int:
        """Bytes of gradients that have left the devices so far."""
        return sum(pipe.bytes_out for pipe in self._pipes.values())

    @property
    def host_bytes(self) -> int:
        """Host memory that the sums take."""
        return 0 if self._sums is None else self._sums.bytes

    # ----------------------------------------------------------------- window

    def begin(
        self, parameters: list[nn.Parameter], known: Mapping[str, float] | None = None
    ) -> None:
        super().begin(parameters, known)
        self.target.sixteen_bit.begin()  # hooks see what the plain window would add
        if self._sums is None or not self._sums.is_for(parameters):
            self._sums = None  # first, so that two sets never exist at once
            self._sums = Sums.of(parameters, self.target.optimizers)
        self._sums.filled = set()
        self._staying.begin(parameters)
        for parameter in parameters:
            if parameter.device not in self._pipes:
                self._pipes[parameter.device] = _way(parameter.device, self._sums.bytes)
        self.hook(self._leave)

    def _leave(self, parameter: Tensor) -> None:
        """A gradient of this parameter is made: it leaves."""
        gradient = parameter.grad
        if gradient is None:  # a function of the graph had none to give
            return
        assert self._sums is not None
        assert isinstance(parameter, nn.Parameter)
        if gradient.is_sparse:
            raise UnsupportedError(
                f'{self.target.name_of(parameter)}: a sparse gradient with gradients="host"; use '
                "sparse=False, or keep the gradients on the device"
            )
        parameter.grad = None
        first = id(parameter) not in self._sums.filled
        self._sums.filled.add(id(parameter))
        total = self._sums.flat(parameter)
        pipe = self._pipes[parameter.device]
        stays = self._staying.sums.get(id(parameter))
        if stays is not None:  # a second gradient of it in this backward
            total = stays
        elif self._may_stay and isinstance(pipe, Link):
            stays = self._staying.room_for(parameter, total)
        norms: list[Tensor] | None = None
        if self._is_last:  # the norm is taken on the way, while the sum is in the cache
            norms = self._norms[(total if stays is None else stays).data_ptr()] = []
        flat = flat_of(gradient.detach(), parameter)
        if isinstance(pipe, Link):
            pipe.put(flat, total, first=first, norms=norms, stays=stays)
        else:
            pipe.put(flat, total, first=first, norms=norms)

    def before_backward(self, last: bool, totals: Numbers, units: Numbers) -> bool:
        self._is_last = last
        # In its first step an optimizer takes memory for its state: none of it is promised here.
        self._may_stay = (
            last and self._has_stepped and self.sync.ranks == 1 and not self._steps_on_host
        )
        self._norms = {}
        return True

    def backward_made(self) -> None:
        for pipe in self._pipes.values():
            pipe.backward_made()

    def _drain(self) -> Sums:
        for pipe in self._pipes.values():
            pipe.drain()
        assert self._sums is not None
        return self._sums

    def _sum(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum in the parameter's shape, wherever it is; None where there is none."""
        assert self._sums is not None
        here = self._staying.sums.get(id(parameter))
        return self._sums.shaped(parameter) if here is None else like(parameter, here)

    # ------------------------------------------------------------------ close

    def absent(self) -> set[int]:
        assert self._sums is not None
        return {id(p) for p in self.parameters} - self._sums.filled

    def drop(self, parameter: nn.Parameter) -> None:
        self._nowhere.add(id(parameter))

    def close(
        self, groups: Sequence[Sequence[nn.Parameter]], normalise: float, hooks: DeferredHooks
    ) -> Closed:
        sums = self._drain()
        if self.sync.ranks > 1:
            self._reduce(sums)
        if self.sync.ranks > 1 or hooks.taken:
            self._norms = {}  # of sums that were not what they are to be yet
        # A fused step multiplies in float32, and what is rounded is multiplied before.
        rounds = self.target.sixteen_bit.rounds
        in_place = any(p.dtype is not torch.float32 and not rounds(p) for p in self.parameters)
        return close_gradients(
            [[_Holder(self._sum(parameter)) for parameter in group] for group in groups],
            self.target.optimizers,
            self.options,
            normalise,
            before_clip=(lambda: hooks.run(self._lent)) if hooks.taken else None,
            total_norm=self._total_norm,
            in_place=in_place or self._steps_on_host,
        )

    def _total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm over these sums, from what was found on the way where it was."""
        found = [self._norms.get(gradient.data_ptr()) for gradient in gradients]
        known = [norm for norms in found if norms for norm in norms]
        others = [g for g, norms in zip(gradients, found, strict=True) if not norms]
        norms = torch.stack([*on_host(known), total_norm(others)])
        total: Tensor = torch.linalg.vector_norm(norms)
        if not bool(torch.isfinite(total)):  # squares overflow in float32 where numbers do not
            total = total_norm(gradients)
        return total

    def _reduce(self, sums: Sums) -> None:
        """Bucket by bucket, once per window; where the ranks talk to each other."""
        for bucket in sums.buckets:
            here = bucket.parameters[0].device
            for parameter in bucket.parameters:
                if id(parameter) not in sums.filled:
                    sums.flat(parameter).zero_()
            bucket.flat.copy_(self.sync.sum_tensor(bucket.flat.to(here)))
        sums.filled = {id(parameter) for parameter in self.parameters} - self._nowhere

    @contextmanager
    def _lent(self, parameter: nn.Parameter) -> Iterator[None]:
        """Within it the sum is the parameter's `.grad`, for the user's own gradient hooks."""
        held = self._sum(parameter)
        if held is None:
            yield
            return
        found = parameter.grad_dtype
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
        sums = self._drain()
        rounds = self.target.sixteen_bit.rounds
        stayed = self._staying.sums
        way = HostStep(rounds) if self._steps_on_host else Returns(rounds, remaining, stayed)
        for index, optimizer in enumerate(self.target.optimizers):
            buckets = [
                (bucket, [p for p in bucket.parameters if id(p) in sums.filled])
                for bucket in sums.buckets
                if bucket.optimizer == index
            ]
            with in_parts(optimizer):
                for parameters in way.over(optimizer, buckets, sums):
                    rest = 1.0 if rounds(parameters[0]) else remaining
                    with stepping(optimizer, rest), only(optimizer, parameters):
                        optimizer.step()
        self._has_stepped = True

    # ------------------------------------------------------------------ state

    def saved(self) -> list[Tensor | None]:
        self._drain()
        held = [self._sum(parameter) for parameter in self.parameters]
        return [None if one is None else one.to("cpu", copy=True) for one in held]

    def load(self, saved: Any) -> None:
        sums = self._drain()
        for parameter, gradient in zip(self.parameters, saved, strict=True):
            if gradient is not None:
                like(parameter, sums.flat(parameter)).copy_(gradient)
                sums.filled.add(id(parameter))

    def discard(self) -> None:
        for pipe in self._pipes.values():
            pipe.forget()
        super().discard()
        self.target.sixteen_bit.end()
        self._nowhere, self._norms = set(), {}
        self._staying.sums.clear()
        if self._sums is not None:
            self._sums.filled = set()


_LEAST = 2**20
"""Smaller sums travel: to ask for room costs more."""


class Staying:
    """The sums of one window that are on their device, by the parameter."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}
        self._aside = 0
        self._full = False

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing stays yet; what a backward may still need beside what it holds is kept free."""
        self.sums.clear()
        self._full = False
        self._aside = 2 * max((p.numel() * max(4, p.element_size()) for p in parameters), default=0)

    def room_for(self, parameter: nn.Parameter, total: Tensor) -> Tensor | None:
        """New memory of the device for this sum, below the highest peak so far; None: no room."""
        if self._full or total.nbytes < _LEAST:
            return None
        found = torch.cuda.memory_stats(parameter.device)
        needed = found.get("allocated_bytes.all.current", 0) + total.nbytes + self._aside
        if needed > found.get("allocated_bytes.all.peak", 0):  # some allocators do not say
            return None
        try:
            room = torch.empty(total.shape, dtype=total.dtype, device=parameter.device)
        except torch.OutOfMemoryError:  # there is enough, in pieces
            self._full = True
            return None
        self.sums[id(parameter)] = room
        return room


_Buckets: TypeAlias = Sequence[tuple[Bucket, list[nn.Parameter]]]


@dataclass(eq=False, slots=True)
class _OnItsWay:
    """Gradients of a bucket, and the event after which they are there.

    What was rounded is kept until then: its memory must not be used for something else before.
    """

    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    arrived: torch.cuda.Event | None
    rounded: Tensor | None


class Returns:
    """The sums come back: within an iteration the parameters of a bucket have their gradients.

    What is to be rounded to 16 bit is multiplied by `factor` first, and then rounded, once. Sums
    that have `stayed` on the device are taken from there.
    """

    def __init__(
        self,
        rounds: Callable[[nn.Parameter], bool],
        factor: float,
        stayed: dict[int, Tensor] | None = None,
    ) -> None:
        self._rounds = rounds
        self._factor = factor
        self._stayed = {} if stayed is None else stayed
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def over(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: _Buckets,
        sums: Sums,
    ) -> Iterator[list[nn.Parameter]]:
        """The parameters of one bucket after the other, each with its `.grad`."""
        ahead: list[_OnItsWay] = []
        used = [(bucket, parameters) for bucket, parameters in buckets if parameters]
        try:
            for index in range(len(used) + 1):
                if index < len(used):
                    ahead.append(self._sent(*used[index], sums))
                if index == 0:
                    continue
                here = ahead.pop(0)
                parameters = here.parameters
                if here.arrived is not None:
                    torch.cuda.current_stream(parameters[0].device).wait_event(here.arrived)
                for parameter, gradient in zip(parameters, here.gradients, strict=True):
                    if parameter.grad_dtype is not gradient.dtype:
                        parameter.grad_dtype = gradient.dtype
                    parameter.grad = gradient
                del here, gradient
                yield parameters
                for parameter in parameters:
                    parameter.grad = None
        finally:
            for stream in self._streams.values():
                stream.synchronize()  # the sums may be overwritten from here on

    def _sent(self, bucket: Bucket, parameters: list[nn.Parameter], sums: Sums) -> _OnItsWay:
        """Start the way back of a bucket, but for what has stayed.

        All of it in one piece where the whole bucket comes back, as it nearly always does.
        """
        narrow = parameters[0].dtype if self._rounds(parameters[0]) else None
        flats = {id(p): self._stayed.pop(id(p)) for p in parameters if id(p) in self._stayed}
        if narrow is not None:
            for key, flat in flats.items():
                flats[key] = flat.mul_(self._factor).to(narrow)
        coming = [p for p in parameters if id(p) not in flats]
        wide = arrived = None
        if coming:
            held = [sums.flat(parameter) for parameter in coming]
            rows = [bucket.flat] if len(coming) == len(bucket.parameters) else held
            whole, arrived, wide = self._fetched(rows, coming[0].device, narrow)
            sizes = [one.numel() for one in held]
            flats.update(zip(map(id, coming), whole.split(sizes), strict=True))
        gradients = [like(parameter, flats[id(parameter)]) for parameter in parameters]
        return _OnItsWay(parameters, gradients, arrived, wide)

    def _fetched(
        self, rows: list[Tensor], device: torch.device, narrow: torch.dtype | None
    ) -> tuple[Tensor, torch.cuda.Event | None, Tensor | None]:
        """These sums as one row on the device, when it is there, and what it was rounded from."""
        if device.type != "cuda":
            whole = rows[0] if len(rows) == 1 else torch.cat(rows)
            return (whole if narrow is None else whole.mul(self._factor).to(narrow)), None, None
        current = torch.cuda.current_stream(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        sizes = [row.numel() for row in rows]
        whole = torch.empty(sum(sizes), dtype=rows[0].dtype, device=device)
        small = None if narrow is None else torch.empty_like(whole, dtype=narrow)
        side.wait_stream(current)  # what the memory was used for before must be over
        with torch.cuda.stream(side), torch.no_grad():
            for target, row in zip(whole.split(sizes), rows, strict=True):
                target.copy_(row, non_blocking=True)
            if small is not None:
                small.copy_(whole.mul_(self._factor))
            arrived = side.record_event()
        return (whole, arrived, None) if small is None else (small, arrived, whole)


class HostStep:
    """The parameters come to the host, are stepped there, and go back; the state stays there."""

    def __init__(self, rounds: Callable[[nn.Parameter], bool]) -> None:
        self._rounds = rounds
        self._on_device: dict[int, Tensor] = {}

    @torch.no_grad()
    def over(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: _Buckets,
        sums: Sums,
    ) -> Iterator[list[nn.Parameter]]:
        """The parameters of one bucket after the other, on the host with their `.grad`."""
        used = [parameters for _, parameters in buckets if parameters]
        ahead = _fetched(used[0]) if used else None
        for index, parameters in enumerate(used):
            assert ahead is not None
            copies, arrived = ahead
            ahead = _fetched(used[index + 1]) if index + 1 < len(used) else None
            if arrived is not None:
                arrived.synchronize()
            for parameter, copy in zip(parameters, copies, strict=True):
                _state_to_host(optimizer, parameter)
                gradient = sums.flat(parameter)
                if self._rounds(parameter):
                    gradient = gradient.to(parameter.dtype)
                if copy is not None:
                    self._on_device[id(parameter)] = parameter.data
                    parameter.data = like(parameter, copy)
                if parameter.grad_dtype is not gradient.dtype:
                    parameter.grad_dtype = gradient.dtype
                parameter.grad = like(parameter, gradient)
            try:
                yield parameters
            finally:
                self._give_back(parameters)

    def _give_back(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
            on_device = self._on_device.pop(id(parameter), None)
            if on_device is not None:
                stepped, parameter.data = parameter.data, on_device
                parameter.data.copy_(stepped, non_blocking=True)


def _state_to_host(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """State that is on the device (from a checkpoint, or from steps made there) moves for good."""
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            state[name] = value.cpu()


def _fetched(
    parameters: list[nn.Parameter],
) -> tuple[list[Tensor | None], torch.cuda.Event | None]:
    """Start to copy parameters to the host; None for one that is there already."""
    device = parameters[0].device
    if device.type != "cuda":
        return [None] * len(parameters), None
    copies: list[Tensor | None] = []
    for parameter in parameters:
        copy = torch.empty(parameter.numel(), dtype=parameter.dtype, pin_memory=True)
        copies.append(copy.copy_(flat_of(parameter.data, parameter), non_blocking=True))
    return copies, torch.cuda.current_stream(device).record_event()
