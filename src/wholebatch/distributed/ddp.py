"""DistributedDataParallel: every rank holds the whole model.

The model is kept in `no_sync` for good, and the window makes its one reduction itself (see
`buckets`): exact with parameters that the last micro-batch does not use, with ranks that have run
out of data, and with the same bits after a restart. Nothing is averaged, so nothing is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.distributed.gradient_buckets import Buckets
from wholebatch.distributed.process_group import Group
from wholebatch.distributed.sync_strategy import Sync
from wholebatch.errors import OptionError, UnsupportedError, WindowError

__all__ = ["Replicated"]


class Replicated(Sync):
    """One or several DDP models on the same process group."""

    def __init__(self, models: Sequence[DistributedDataParallel], *, sync: str = "auto") -> None:
        if sync == "every":
            raise OptionError(
                'sync="every" with DistributedDataParallel: it would reduce the same bytes once '
                'per micro-batch and save no memory; use "hold" or "auto"'
            )
        for model in models:
            _check(model)
        self._models = tuple(models)
        self._process_group = models[0].process_group
        device = next(models[0].parameters()).device
        self._group = Group([self._process_group], device, rank=dist.get_rank(self._process_group))
        self.ranks = self._group.ranks
        self.rank = self._group.rank
        self.counts_must_agree = any(
            isinstance(module, nn.SyncBatchNorm) for model in models for module in model.modules()
        )
        self.takes_graphs = not self.counts_must_agree  # else collectives run in the forward
        self.policy = "hold: gradients are reduced once per window, during its last backward"
        self._buckets: Buckets | None = None
        self._layout: list[int] = []
        for model in models:  # what model.no_sync() sets, for as long as this window is used
            model.require_backward_grad_sync = False
            model.require_forward_param_sync = False  # buffers: once, in `after_update`

    def backward(
        self, parameters: Sequence[nn.Parameter], *, reduces: bool, overlap: bool = True
    ) -> AbstractContextManager[None]:
        if any(model.require_backward_grad_sync for model in self._models):
            raise WindowError(
                "DistributedDataParallel's own synchronisation was switched on again, so gradients "
                "would be reduced twice: leave model.require_backward_grad_sync to the accumulator"
            )
        if not reduces:
            return nullcontext()
        return self._of(parameters).reducing(overlap=overlap)

    def reduce_now(self, parameters: Sequence[nn.Parameter]) -> None:
        with self._of(parameters).reducing(overlap=False):
            pass

    def waited(self) -> float | None:
        return self._group.waiting.seconds

    def filled_in(self) -> set[int]:
        return set() if self._buckets is None else self._buckets.filled_in

    def _of(self, parameters: Sequence[nn.Parameter]) -> Buckets:
        layout = [id(parameter) for parameter in parameters]
        if self._buckets is None or layout != self._layout:
            self._buckets = Buckets(parameters, self._process_group, self._group.wait)
            self._layout = layout
        return self._buckets

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._group.sum(values)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        return self._group.sum_tensor(tensor)

    def largest(self, value: Tensor) -> Tensor:
        return self._group.largest(value)

    def after_update(self) -> None:
        """Buffers of the first rank for all, as DDP does at the first forward after a sync."""
        for model in self._models:
            buffers = [b for b in model.module.buffers() if b.dtype.is_floating_point]
            if model.broadcast_buffers and buffers and self.ranks > 1:
                self._group.broadcast(buffers)


def _check(model: DistributedDataParallel) -> None:
    hooks: list[Any] = getattr(model, "_comm_hooks", [])
    if hooks:
        raise UnsupportedError(
            "DistributedDataParallel with a communication hook: the window makes its one "
            "reduction itself, exactly, and would not run the hook; do not register it"
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedError(
                f"{name}: sparse gradients over several ranks are not supported; use sparse=False"
            )
