"""A pipeline: every rank holds some stages of the model, or of one of its replicas.

The schedule moves activations and their gradients between stages by itself; nothing there is
averaged. What is left are sums: losses and units are on the last stage and are wanted on all, the
norm is over the parameters of all stages, and replicas of a stage add up their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.distributed.gradient_buckets import Buckets
from wholebatch.distributed.process_group import Group
from wholebatch.distributed.sync_strategy import Sync

__all__ = ["Pipelined"]


class Pipelined(Sync):
    """The ranks of one pipeline, and those that hold replicas of this rank's stages."""

    same_parameters = False

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: dist.ProcessGroup | None,
        data_parallel: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._modules = tuple(modules)
        self._device = device
        self.rank = dist.get_rank()
        self.stages = Group([group], device, rank=dist.get_rank(group))
        self._replica_group = data_parallel
        self._replicas: Group | None = None
        groups = [group]
        if data_parallel is not None:
            self._replicas = Group([data_parallel], device, rank=dist.get_rank(data_parallel))
            groups.append(data_parallel)
        self._group = Group(groups, device, rank=self.rank)
        self.ranks = self._group.ranks
        self.policy = "hold: replicas of a stage add up their gradients once per window"
        if self._replicas is not None:
            with torch.no_grad():
                self._replicas.broadcast([p for m in modules for p in m.parameters()])
            self.after_update()

    @contextmanager
    def backward(
        self, parameters: Sequence[nn.Parameter], *, reduces: bool, overlap: bool = True
    ) -> Iterator[None]:
        yield  # the schedule makes the backwards

    def reduce_now(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._replicas is None:
            return
        present = torch.tensor([float(p.grad is not None) for p in parameters])
        on_some = self._replicas.sum_tensor(present.to(self._device)).tolist()
        used = [p for p, count in zip(parameters, on_some, strict=True) if count]
        with Buckets(used, self._replica_group, self._replicas.wait).reducing(overlap=False):
            pass

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._group.sum(values)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        return self._group.sum_tensor(tensor)

    def largest(self, value: Tensor) -> Tensor:
        return self._group.largest(value.to(self._device))

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        # In float64 at once: stages have different numbers of gradients, and call this once each.
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient in gradients:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        return self.stages.sum_tensor(square).sqrt()

    def after_update(self) -> None:
        """Buffers of the first replica for all, as DDP does."""
        if self._replicas is not None:
            buffers = [b for m in self._modules for b in m.buffers() if b.is_floating_point()]
            self._replicas.broadcast(buffers)
