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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import Closed, CloseOptions, DeferredHooks, close_gradients
from wholebatch.core.gradient_store import Store
from wholebatch.core.optimizer_step import stepping
from wholebatch.distributed import Sync
from wholebatch.errors import UnsupportedError
from wholebatch.offload.adder_thread import Pipe
from wholebatch.offload.close_on_device import Numbers
from wholebatch.offload.device_to_host import Link
from wholebatch.offload.host_norm import on_host, total_norm
from wholebatch.offload.host_sums import Sums, flat_of, like
from wholebatch.offload.partial_steps import in_parts, only
from wholebatch.offload.staying_sums import Staying
from wholebatch.offload.sums_to_optimizer import HostStep, Returns

if TYPE_CHECKING:
    from wholebatch.core.model_and_optimizer import Target

__all__ = ["HostStore"]


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
