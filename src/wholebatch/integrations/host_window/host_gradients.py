"""The gradients that a host's backwards leave: who reduces them, and where a window finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from wholebatch.core.close import (
    Closed,
    DeferredHooks,
    close_gradients,
    dense_gradients,
)
from wholebatch.core.close_on_device import Numbers
from wholebatch.core.gradient_store import DeviceStore, Store
from wholebatch.core.precision import SIXTEEN_BIT, LossScale
from wholebatch.distributed import Sync
from wholebatch.distributed.ddp import Buckets
from wholebatch.distributed.process_group import Group, world_size

GradientsIn: TypeAlias = Literal["whole", "sharded", "elsewhere"]
"""Where a host's engine keeps gradients between two backwards of a window: whole ones in `.grad`;
in the engine until the last backward leaves slices in `.grad` (FSDP); nowhere that we see."""


class HostEngine(Sync):
    """An engine whose reduction is the host's: its last backward of a window averages over ranks.

    Backwards of ours run within `held`, and only gradients that they have added are reduced here.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        device: torch.device,
        kept: GradientsIn,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.kept = kept
        self.takes_graphs = self.keeps_gradients = kept == "whole"
        self._device, self._inside = device, inside
        modules = [module for model in models for module in model.modules()]
        self.replicas = [one for one in modules if isinstance(one, DistributedDataParallel)]
        if world_size() > 1:
            self.use_group(Group([None], device, rank=dist.get_rank()))
        self.averaged_by = float(self.ranks)
        self.begin()

    def begin(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self._filled_in: set[int] = set()
        self.reduced = False  # True if the last backward was the host's, and has reduced
        self.held_back = False  # True if it was the host's, and has not

    def backward_made(self) -> None:
        """Note whether the host's engine has reduced in the backward that is over."""
        self.reduced = all(replica.require_backward_grad_sync for replica in self.replicas)
        self.held_back = not self.reduced

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let backwards of ours pass within this context, without a reduction."""
        with ExitStack() as stack:
            stack.enter_context(self._inside())
            for replica in self.replicas:
                stack.enter_context(replica.no_sync())
            yield
        self.reduced = self.held_back = False

    def backward(
        self, parameters: Sequence[nn.Parameter], *, reduces: bool, overlap: bool = True
    ) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def reduce_now(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.group is None or not parameters:
            return
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        buckets = Buckets(parameters, None, self.group.wait)
        with buckets.reducing(overlap=False):
            pass
        self._filled_in = buckets.filled_in
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], self.averaged_by)

    def filled_in(self) -> set[int]:
        return self._filled_in

    def largest(self, value: Tensor) -> Tensor:
        return super().largest(value.to(self._device))  # parameters may be on the CPU

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        if self.kept != "elsewhere" and any(isinstance(one, DTensor) for one in gradients):
            norm = torch.nn.utils.get_total_norm(gradients)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.kept == "whole" or self.group is None:
            return super().total_norm(gradients)
        return self.group.norm(gradients)

    def discard(self) -> None:
        return


class HostScale(LossScale):
    """The loss scale of a host's GradScaler, which unscales and skips by itself before its step.

    `owner` has the scaler as its attribute `scaler`, if there is one.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner

    @property
    def scaler(self) -> Any:  # type: ignore[override]
        """The host's GradScaler, or None."""
        return getattr(self._owner, "scaler", None)

    @property
    def enabled(self) -> bool:
        return self.scaler is not None and bool(self.scaler.is_enabled())

    def scale(self, seed: Tensor) -> Tensor:
        return super().scale(seed) if self.enabled else seed

    def value(self) -> float:
        return 1.0  # the close leaves the scale in the gradients

    def update(self, *, finite: bool) -> None:
        return


class HostGradients(DeviceStore):
    """The gradients of a host's optimizers, which stay in `.grad` for the host to step with.

    Those of 16-bit parameters under DDP are added in fp32 beside `.grad`, which DDP's buckets need
    in the parameter's dtype. bf16 keeps 8 bits: 256 additions leave an error of 1.6e-2, fp32 of
    1.2e-3 (that of the gradients themselves).
    """

    lends = True
    takes_buffers = False
    sync: HostEngine

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._strangers: list[nn.Parameter] = []  # parameters of the models that nobody steps
        self._sums: dict[int, Tensor] = {}  # of 16-bit parameters, by id
        self._beside: list[nn.Parameter] = []  # those that the open window trains
        self._unused = False  # True if a window was completed and no optimizer has stepped since
        if self._adds_beside:
            self.only_eager = "16-bit parameters in DDP, which reduces their gradients in 16 bit"
        for optimizer in self.target.optimizers:
            optimizer.register_step_post_hook(self._stepped)

    @property
    def _adds_beside(self) -> bool:
        return bool(self.sync.replicas and self.target.sixteen_bit.parameters)

    def _stepped(self, *_: Any) -> None:
        self._unused = False

    @property
    def stray(self) -> str:  # type: ignore[override]
        why = (
            "the window before was completed, but no optimizer.step() was made from it"
            if self._unused
            else "this window did not make it"
        )
        return (
            "holds a gradient at the first backward of a window, and it would be counted in "
            f"({why}): call optimizer.zero_grad() after every optimizer.step(), and give every "
            "loss to the window"
        )

    def refuse_stray(self) -> None:
        if self.sync.kept != "elsewhere":
            super().refuse_stray()

    def begin(
        self, parameters: list[nn.Parameter], known: Mapping[str, float] | None = None
    ) -> None:
        kept = [] if self.sync.kept == "elsewhere" else parameters
        if self._adds_beside:
            self.target.sixteen_bit.end()
            self._beside = [one for one in kept if one.dtype in SIXTEEN_BIT]
            Store.begin(self, kept, known)
        else:
            super().begin(kept, known)
        own = {id(parameter) for parameter in parameters}
        everything = (p for model in self.target.models for p in model.parameters())
        self._strangers = [p for p in everything if kept and id(p) not in own]

    @torch.no_grad()
    def backward_made(self) -> None:
        """Take over the gradients that are added beside `.grad`."""
        for parameter in self._beside:
            gradient, there = parameter.grad, self._sums.get(id(parameter))
            if gradient is not None:
                wide = gradient.float()
                self._sums[id(parameter)] = wide if there is None else there.add_(wide)
                parameter.grad = None

    def reduce_now(self, totals: Numbers, units: Numbers) -> None:
        """Reduce what no backward of the host has: all, or the sums beside `.grad`."""
        if self._beside:
            self.target.sixteen_bit.begin()
            for parameter in self._beside:
                parameter.grad = self._sums.get(id(parameter))
            self._sums.clear()
        self.sync.reduce_now(self._beside if self.sync.reduced else self.parameters)

    def close(
        self, groups: Sequence[Sequence[nn.Parameter]], normalise: float, hooks: DeferredHooks
    ) -> Closed:
        return close_gradients(
            [[*self.parameters, *self._strangers]],
            (),
            self.options,
            normalise,
            before_clip=hooks.run if hooks.taken else None,
            total_norm=self.sync.total_norm,
            in_place=True,
        )

    def refuse_nothing(self) -> None:
        if self.parameters:
            super().refuse_nothing()

    def hand_over(self, remaining: float) -> None:
        super().hand_over(remaining)
        self._unused = True

    def skip(self) -> None:
        """Leave a scaler something to look at, and the step of others nothing to work on."""
        if self.target.scale is not None and self.target.scale.enabled:
            for gradient in dense_gradients(self.parameters):
                gradient.mul_(0.0)
            self.parameters = []

    def discard(self) -> None:
        for parameter in self._strangers if self.parameters else ():
            parameter.grad = None
        self._strangers = []
        self._sums.clear()
        super().discard()

    # A checkpoint is one file, and every rank holds gradients of its own until the last backward.
    # Their sum, given to one rank on the way back, leads to the same update.

    @torch.no_grad()
    def saved(self) -> list[Tensor | None]:
        held = [self._sums.get(id(one), one.grad) for one in self.parameters]
        if self.sync.group is None:
            return [None if gradient is None else gradient.clone() for gradient in held]
        ranks = self.sync.sum([float(gradient is not None) for gradient in held])
        return [
            self.sync.sum_tensor(_dense(gradient, parameter)) if on_ranks else None
            for gradient, parameter, on_ranks in zip(held, self.parameters, ranks, strict=True)
        ]

    def load(self, saved: Any) -> None:
        if self.sync.rank != 0:
            return
        beside = set(map(id, self._beside))
        for parameter, gradient in zip(self.parameters, saved, strict=True):
            if gradient is not None and id(parameter) in beside:
                self._sums[id(parameter)] = gradient.to(parameter.device, torch.float32)
            elif gradient is not None:
                parameter.grad = gradient.to(parameter.device, copy=True)


def _dense(gradient: Tensor | None, like: nn.Parameter) -> Tensor:
    """Return a gradient as all ranks can add it; zeros where this rank has none."""
    if gradient is None:
        return torch.zeros_like(like, dtype=torch.float32 if like.dtype in SIXTEEN_BIT else None)
    return gradient.to_dense() if gradient.is_sparse else gradient
