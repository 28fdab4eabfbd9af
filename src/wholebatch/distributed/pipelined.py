"""The ranks of a pipeline: each holds other stages of one model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.distributed.ddp import Buckets
from wholebatch.distributed.process_group import Group
from wholebatch.distributed.sync_strategy import Parameters, ReducesAtClose


class Pipelined(ReducesAtClose):
    """The ranks of one pipeline, and those that hold replicas of this rank's stages.

    The schedule moves activations and their gradients between stages, and averages nothing. What
    is left are sums: losses and units are on the last stage and are wanted on all, the norm is over
    the parameters of all stages, and replicas of a stage add up their gradients.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: dist.ProcessGroup | None,
        data_parallel: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._modules = tuple(modules)
        self._device = device
        self.stages = Group([group], device, rank=dist.get_rank(group))
        self._replica_group = data_parallel
        groups = [group]
        if data_parallel is not None:
            self.replicas = Group([data_parallel], device, rank=dist.get_rank(data_parallel))
            groups.append(data_parallel)
        super().__init__(Group(groups, device, rank=dist.get_rank()))
        self.peers = self.replicas
        if self.replicas is not None:
            with torch.no_grad():
                self.replicas.broadcast([p for m in modules for p in m.parameters()])
            self.after_update()

    def reduce(self, parameters: Parameters) -> Collection[int]:
        if self.replicas is None:
            return ()
        present = torch.tensor([float(p.grad is not None) for p in parameters])
        on_some = self.replicas.sum_tensor(present.to(self._device)).tolist()
        used = [p for p, count in zip(parameters, on_some, strict=True) if count]
        with Buckets(used, self._replica_group).reducing(overlap=False):
            pass
        return ()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return self.stages.norm(gradients)

    def after_update(self) -> None:
        """Broadcast the first replica's buffers, as DDP does."""
        if self.replicas is not None:
            buffers = [b for m in self._modules for b in m.buffers() if b.is_floating_point()]
            self.replicas.broadcast(buffers)
