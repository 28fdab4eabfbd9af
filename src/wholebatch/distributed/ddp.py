"""DistributedDataParallel: every rank holds the whole model.

The model is kept in `no_sync` as long as its window exists, and the window makes its one reduction
itself, in buckets, while the last backward still runs. DDP's own reducer must see every parameter
in its one reducing backward, has buckets that change after the first, and waits for ranks that have
no backward to make. Here the layout is fixed (the same bits after a restart), buckets go out in one
fixed order on every rank, and what the last backward did not touch is sent when it is over:
gradients from earlier micro-batches, or zeros. Nothing is averaged, so nothing is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.distributed.process_group import Group
from wholebatch.distributed.sync_strategy import Context, Parameters, ReducesAtClose
from wholebatch.errors import OptionError, UnsupportedError, WindowError

_BUCKET_BYTES = 25 * 2**20


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    dtype: torch.dtype
    missing: int = 0
    flat: Tensor | None = None
    work: Any = None


class Buckets:
    """The gradients of some parameters, summed over the ranks of a group.

    `send` replaces the collective where only its memory is measured.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        send: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self._send = send or (lambda flat: dist.all_reduce(flat, group=group, async_op=True))
        # In the order of a backward.
        buckets = in_buckets(
            reversed(parameters), _BUCKET_BYTES, lambda p: (_grad_dtype(p), p.device)
        )
        self._buckets = [_Bucket(bucket, _grad_dtype(bucket[0])) for bucket in buckets]
        self._next = 0
        self.filled_in: set[int] = set()
        """The parameters, by id, that had no gradient here at the last reduction."""

    @contextmanager
    def reducing(self, *, overlap: bool) -> Iterator[None]:
        """Reduce around a backward: afterwards every gradient is the sum over the ranks."""
        self._next = 0
        self.filled_in.clear()
        with ExitStack() as hooks:
            for bucket in self._buckets:
                bucket.missing = len(bucket.parameters)
                ready = partial(self._ready, bucket)
                for parameter in bucket.parameters if overlap else ():
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(ready))
            yield
        while self._next < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            self._receive(bucket)

    def _ready(self, bucket: _Bucket, _: Tensor) -> None:
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send_next()

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.flat = torch.cat(
            [
                torch.zeros(p.numel(), dtype=bucket.dtype, device=p.device)
                if p.grad is None
                else p.grad.reshape(-1)
                for p in bucket.parameters
            ]
        )
        sent = torch.view_as_real(bucket.flat) if bucket.flat.is_complex() else bucket.flat
        bucket.work = self._send(sent)

    @torch.no_grad()
    def _receive(self, bucket: _Bucket) -> None:
        assert bucket.flat is not None
        if bucket.work is not None:
            bucket.work.wait()  # on CUDA it orders the streams; the host does not stop here
        sizes = [parameter.numel() for parameter in bucket.parameters]
        for parameter, piece in zip(bucket.parameters, bucket.flat.split(sizes), strict=True):
            if parameter.grad is None:
                parameter.grad = piece.view_as(parameter).clone()
                self.filled_in.add(id(parameter))
            else:
                parameter.grad.copy_(piece.view_as(parameter))
        bucket.flat = bucket.work = None


def _grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def in_buckets(
    parameters: Iterable[nn.Parameter],
    most: int,
    kind: Callable[[nn.Parameter], Hashable] = lambda p: (p.dtype, p.device),
) -> list[list[nn.Parameter]]:
    """Put neighbours of one kind together, up to `most` bytes of their sums."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[Hashable, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        size = parameter.numel() * max(4, parameter.element_size())
        bucket, filled = filling.get(kind(parameter), ([], 0))
        if not bucket or filled + size > most:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind(parameter)] = bucket, filled + size
    return buckets


_holders: WeakSet[Replicated] = WeakSet()


def _give_back(models: Sequence[DistributedDataParallel]) -> None:
    """Switch DDP's own synchronisation on again, where no other window holds it."""
    held = {id(model) for holder in _holders for model in holder.models}
    for model in models:
        if id(model) not in held:
            model.require_backward_grad_sync = True
            model.require_forward_param_sync = True


class Replicated(ReducesAtClose):
    """One or several DDP models on the same process group.

    Their own reduction is off until this object is deleted.
    """

    def __init__(self, models: Sequence[DistributedDataParallel], *, sync: str = "auto") -> None:
        if sync == "every":
            raise OptionError(
                'sync="every" with DistributedDataParallel: it would reduce the same bytes once '
                'per micro-batch and save no memory; use "hold" or "auto"'
            )
        for model in models:
            _check(model)
        self.models = tuple(models)
        self._process_group = models[0].process_group
        device = next(models[0].parameters()).device
        rank = dist.get_rank(self._process_group)
        super().__init__(Group([self._process_group], device, rank=rank))
        self.replicas = self.group
        self.counts_must_agree = any(
            isinstance(module, nn.SyncBatchNorm) for model in models for module in model.modules()
        )
        self._buckets: Buckets | None = None
        self._layout: list[int] = []
        self._is_reduced = False
        for model in models:  # what model.no_sync() sets, for as long as this window is used
            model.require_backward_grad_sync = False
            model.require_forward_param_sync = False  # buffers: once, in `after_update`
        _holders.add(self)
        finalize(self, _give_back, self.models)

    def begin(self, parameters: Parameters) -> None:
        self._is_reduced = False

    def backward(self, parameters: Parameters, *, last: bool) -> Context:
        if any(model.require_backward_grad_sync for model in self.models):
            raise WindowError(
                "DistributedDataParallel's own synchronisation was switched on again, so gradients "
                "would be reduced twice: leave model.require_backward_grad_sync to the accumulator"
            )
        return self._reducing(parameters, overlap=True) if last else nullcontext()

    def reduce(self, parameters: Parameters) -> Collection[int]:
        if not self._is_reduced:
            with self._reducing(parameters, overlap=False):
                pass
        return self._buckets_of(parameters).filled_in

    @contextmanager
    def _reducing(self, parameters: Parameters, *, overlap: bool) -> Iterator[None]:
        with self._buckets_of(parameters).reducing(overlap=overlap):
            yield
        self._is_reduced = True

    def _buckets_of(self, parameters: Sequence[nn.Parameter]) -> Buckets:
        layout = [id(parameter) for parameter in parameters]
        if self._buckets is None or layout != self._layout:
            self._buckets = Buckets(parameters, self._process_group)
            self._layout = layout
        return self._buckets

    def after_update(self) -> None:
        """Broadcast the first rank's buffers, as DDP does at the first forward after a sync."""
        for model in self.models:
            buffers = [b for b in model.module.buffers() if b.dtype.is_floating_point]
            if model.broadcast_buffers and buffers and self.ranks > 1:
                self.group.broadcast(buffers)


def _check(model: DistributedDataParallel) -> None:
    hooks: list[Any] = getattr(model, "_comm_hooks", [])
    if hooks:
        raise UnsupportedError(
            "DistributedDataParallel with a communication hook: the window reduces gradients "
            "itself and would not run the hook; do not register it"
        )
    if model.static_graph:
        raise UnsupportedError(
            "DistributedDataParallel(static_graph=True): it needs DDP's reduction in every "
            "backward, and a window reduces once; leave static_graph out"
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedError(
                f"{name}: a DTensor in DistributedDataParallel; for tensor parallelism beside data "
                'parallelism call fully_shard(model, mesh=mesh["dp"]) instead'
            )
        if name.removeprefix("module.") in model.parameters_to_ignore and parameter.requires_grad:
            raise UnsupportedError(
                f"{name}: DistributedDataParallel ignores this parameter (an expert of this "
                "rank?), but the window would sum its gradient over all ranks: freeze it, or "
                "train it outside of the wrapped model"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedError(
                f"{name}: sparse gradients over several ranks are not supported; use sparse=False"
            )
