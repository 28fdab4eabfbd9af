"""Gradients are freed as soon as they are final: the parameter is updated in the backward itself.

A gradient is final when the window's last backward has made it. If nothing is needed of the whole
gradient first (no norm to clip by, no update to be called off), the optimizer can step on a few
parameters while the backward goes on to the next, and all gradients never exist together.

The losses and units of the window are read, and summed over the ranks, before the last backward. If
a loss is not finite, that backward does not run at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wholebatch.distributed import Sync
from wholebatch.distributed.ddp import in_buckets
from wholebatch.errors import OptionError
from wholebatch.offload.parameter_buckets import (
    BUCKET_BYTES,
    HeldPostHooks,
    as_real,
    bucket_bytes,
    only,
    sum_over_ranks,
)
from wholebatch.window.close import (
    Closed,
    CloseOptions,
    DeferredHooks,
    check_counts,
    is_torchs,
    read_scalars,
)
from wholebatch.window.forward_state import replaced_attributes
from wholebatch.window.gradient_store import DeviceStore
from wholebatch.window.precision import round_gradient

if TYPE_CHECKING:
    from wholebatch.window.model_and_optimizer import Target
    from wholebatch.window.window import OpenWindow


@dataclass(eq=False)
class _SteppedTogether:
    """Parameters of one optimizer, dtype and device that are stepped together."""

    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    missing: int
    done: bool = False


class ReleaseStore(DeviceStore):
    """Gradients in `.grad`, until the last backward has made them final."""

    option = 'gradients="release"'
    steps_on_all = False
    in_grad = False  # the window's last backward must not reduce them: this does
    takes_buffers = False
    steps_in_backward = True
    counts_first = True
    counts_changes = False  # the update is made in backwards

    def __init__(self, target: Target, options: CloseOptions, sync: Sync) -> None:
        super().__init__(target, options, sync)
        self._post_hooks: dict[torch.optim.Optimizer, HeldPostHooks] = {}
        self._clear()

    def _clear(self) -> None:
        self._buckets: list[_SteppedTogether] = []
        self._bucket_of: dict[int, _SteppedTogether] = {}
        self._next = 0
        self._user_hooks: dict[int, Mapping[int, Any]] = {}
        self._window: OpenWindow | None = None
        self._releasing = False  # True while gradients are final as they are made
        self._refused: bool | None = None  # None until the losses are read
        self._norms: list[Tensor] = []
        self._bad: list[Tensor] = []
        self._released: list[nn.Parameter] = []

    # Open window

    def begin(self, window: OpenWindow) -> None:
        super().begin(window)
        self._clear()
        self._window, parameters = window, window.inputs
        self._user_hooks = {
            id(p): p._backward_hooks for p in parameters if p._backward_hooks is not None
        }
        most = bucket_bytes(parameters, BUCKET_BYTES["release"])
        self._buckets = _layout(self.target.optimizers, parameters, most)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self.hook(self._made)

    def before_backward(self, window: OpenWindow, *, last: bool) -> bool:
        if last:
            self._look()
            self._releasing = not self._refused
        return not self._refused

    def _look(self) -> None:
        """Check, before anything changes, that all losses are finite and the units as counted."""
        window = self._window
        assert window is not None
        assert window.known is not None
        names = sorted(window.known)
        totals = [read_scalars(window.totals.get(name, ())) for name in names]
        bad = sum(not math.isfinite(total) for some in totals for total in some)
        counts = [math.fsum(read_scalars(window.units.get(name, ()))) for name in names]
        number, *counts = self.sync.sum([float(bad), *counts])
        check_counts(window.known, dict(zip(names, counts, strict=True)))
        self._refused = number > 0 or not any(counts)

    def _made(self, parameter: Tensor) -> None:
        """Step on a bucket whose last gradient a backward has just made."""
        if not self._releasing:
            return
        bucket = self._bucket_of[id(parameter)]
        bucket.missing -= 1
        if self.sync.ranks > 1:  # in the same order on every rank
            while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
                self._step_on(self._buckets[self._next])
                self._next += 1
        elif bucket.missing == 0:
            self._step_on(bucket)

    def backward_made(self) -> None:
        if self._releasing:
            self._finish()

    @property
    def closes_ahead(self) -> bool:  # type: ignore[override]
        return self._refused is None and not any(self._user_hooks.values())

    def close_ahead(self, *given: Any) -> Closed | None:
        """Close as the plain window does if no backward was the last: all gradients are there."""
        closed = super().close_ahead(*given)
        if closed is None:
            self._step_on_all()
        return closed

    def reduce_now(self) -> None:
        if self.sync.ranks > 1:
            self._step_on_all()

    def _step_on_all(self) -> None:
        """Step on the buckets that are left."""
        if self._refused is None:
            self._look()
        if not self._refused:
            self._finish()

    def _finish(self) -> None:
        """Step on what the last backward did not reach: gradients of earlier ones, or none."""
        self._releasing = False
        for bucket in self._buckets:
            self._step_on(bucket)

    # Steps in the last backward

    @torch.no_grad()
    def _step_on(self, bucket: _SteppedTogether) -> None:
        if bucket.done:
            return
        bucket.done = True
        if self.sync.ranks > 1:
            self._reduce(bucket)
        ready = [parameter for parameter in bucket.parameters if parameter.grad is not None]
        for parameter in ready:
            for hook in list(self._user_hooks.get(id(parameter), {}).values()):
                replaced = hook(parameter.grad)
                parameter.grad = parameter.grad if replaced is None else replaced
        norms = torch._foreach_norm([as_real(p.grad) for p in ready if p.grad is not None])
        if norms:
            norm = torch.linalg.vector_norm(torch.stack([one.double() for one in norms]))
            self._norms.append(norm)
            self._step(bucket.optimizer, ready, ~torch.isfinite(norm))
        for parameter in ready:
            parameter.grad = None

    def _step(
        self, optimizer: torch.optim.Optimizer, ready: list[nn.Parameter], bad: Tensor
    ) -> None:
        self._bad.append(bad)
        fused = (
            getattr(optimizer, "_step_supports_amp_scaling", False)
            and is_torchs(optimizer)
            and all(group.get("fused") for group in optimizer.param_groups)
        )
        if not fused and bool(bad):
            return  # leave them as they are; a fused step finds that out on the device
        for parameter in ready:
            if self.target.sixteen_bit.rounds(parameter):
                round_gradient(parameter)
        if optimizer not in self._post_hooks:  # they run once, after the whole update
            self._post_hooks[optimizer] = HeldPostHooks(optimizer)
        self._released += ready
        found = {"found_inf": bad.to(torch.float32)} if fused else {}
        with only(optimizer, ready), replaced_attributes(optimizer, **found):
            optimizer.step()

    def _reduce(self, bucket: _SteppedTogether) -> None:
        """Sum over the ranks, with the numbers of ranks that have a gradient for each parameter."""
        parameters = bucket.parameters
        like = parameters[0]
        dtype = getattr(like, "grad_dtype", None) or like.dtype
        rows = [
            torch.zeros(p.numel(), dtype=dtype, device=p.device)
            if p.grad is None
            else p.grad.reshape(-1)
            for p in parameters
        ]
        there = torch.tensor(
            [float(p.grad is not None) for p in parameters], dtype=dtype, device=like.device
        )
        *sums, counts = sum_over_ranks(self.sync, [*rows, there])
        for index, (parameter, summed) in enumerate(zip(parameters, sums, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(summed.view_as(parameter))
            elif counts[index].real.item() > 0:
                parameter.grad = summed.view_as(parameter).clone()

    # Close

    def absent(self) -> set[int]:
        return set()

    def refuse_nothing(self) -> None:
        return  # the gradients are used and freed

    def close(self, window: OpenWindow, normalise: float, hooks: DeferredHooks) -> Closed:
        assert normalise == 1.0  # the units were known before the first backward
        if self._refused:
            return Closed(norm=math.nan, clip=1.0, finite=False)
        finite = not any(read_scalars([bad.float() for bad in self._bad]))
        return Closed(norm=math.hypot(*read_scalars(self._norms)), clip=1.0, finite=finite)

    def step(self, remaining: float) -> None:
        """Run the hooks that follow a step: the steps are made already."""
        self._released = []
        for hooks in self._restored_hooks():
            hooks.run()

    def _restored_hooks(self) -> list[HeldPostHooks]:
        held, self._post_hooks = [*self._post_hooks.values()], {}
        for hooks in held:
            hooks.restore()
        return held

    def discard(self) -> None:
        self.spoiled += [(parameter, parameter._version) for parameter in self._released]
        self._restored_hooks()
        super().discard()
        self._clear()


def check_release(target: Target, options: CloseOptions, *, counts_units: bool) -> None:
    """Refuse what needs the whole gradient before the first parameter moves, with the reason."""
    option = 'gradients="release"'
    if options.clip_norm is not None or options.clip_value is not None:
        raise OptionError(
            f"{option} with clip_norm= or clip_value=: clipping needs the whole gradient before "
            'the first parameter is updated; leave it out, or use gradients="host"'
        )
    if options.nonfinite == "raise" or target.scale is not None:
        raise OptionError(
            f"{option} with nonfinite='raise' or a loss scale: whether every gradient is finite is "
            "known only after the first parameters are updated, so the window cannot be taken "
            "back; pass nonfinite='skip', which looks at the losses first, in \"bf16\" or full "
            "precision"
        )
    if not counts_units:
        raise OptionError(
            f"{option} without units=: what a gradient is to be divided by must be known before it "
            "is used and freed; count it before, with units=, a function of the micro-batch"
        )


def _layout(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], most: int
) -> list[_SteppedTogether]:
    """Put parameters into buckets of at most so many bytes, in the order of a backward."""
    owners = {
        id(p): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    buckets = in_buckets(
        reversed(parameters), most, lambda p: (id(owners[id(p)]), p.dtype, p.device)
    )
    return [_SteppedTogether(owners[id(some[0])], some, len(some)) for some in buckets]
