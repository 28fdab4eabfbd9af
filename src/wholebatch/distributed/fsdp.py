"""FSDP2 (`fully_shard`), with HSDP meshes: every rank holds a slice of every parameter.

Forward and backward run collectives of their own, so all ranks must run equally many micro-batches
(`counts_must_agree`). While the reduction is held back, FSDP2 keeps whole gradients; with
`sync="every"` it reduce-scatters after every micro-batch and keeps slices of them.
`wholebatch.distributed.gathered` gathers parameters once per window, without FSDP2's hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from wholebatch.distributed.process_group import Group
from wholebatch.distributed.sync_strategy import ReducesInLastBackward
from wholebatch.distributed.tensor_parallel import norm_over_meshes
from wholebatch.errors import UnsupportedError


class Sharded(ReducesInLastBackward):
    """A model whose modules were passed through `fully_shard`."""

    engine_name = "a sharded model"

    def __init__(self, model: nn.Module, *, sync: str = "auto") -> None:
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        check_parameters(model)
        parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
        sharded = next(filter(None, map(_param_group, self._modules)), None)
        mesh = parameters[0].device_mesh if sharded is None else sharded.mesh_info.mesh
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        super().__init__(Group(groups, torch.device(mesh.device_type), rank=dist.get_rank()))
        self.averaged_by = _divisor(self._modules, self.ranks)
        self._is_hybrid = mesh.ndim == 2
        if self._is_hybrid:
            self.replicas = Group(groups[:1], torch.device(mesh.device_type), rank=dist.get_rank())
        self._sums_every = sync == "every"

    def switch(self, *, last: bool) -> None:
        self._reduce_in_backward(last or self._sums_every, over_replicas=last)

    def run_backward(
        self, totals: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        torch.autograd.backward(totals, seeds)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return norm_over_meshes(gradients)

    def restore(self) -> None:
        """Switch reductions on again, as is the default: FSDP2 does not tell what was set."""
        self._reduce_in_backward(True, over_replicas=True)

    def _reduce_in_backward(self, over_slices: bool, *, over_replicas: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(over_slices, recurse=False)
            if self._is_hybrid:
                module.set_requires_all_reduce(over_replicas, recurse=False)


def check_parameters(model: nn.Module) -> None:
    """Refuse a trained parameter that is not sharded, and parameters in 16 bits."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"{name} is not sharded, so no engine reduces its gradient: call "
                "fully_shard(model) on the root module too"
            )
    check_dtypes(model)


def check_dtypes(model: nn.Module) -> None:
    """Refuse 16-bit parameters: FSDP2 keeps gradients in their dtype, and sums would be rounded."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            raise UnsupportedError(
                f"{name} is {parameter.dtype}, and FSDP2 would round the sum of its gradients to "
                "this dtype after every reduction: keep the parameters in float32, and compute in "
                '16 bit by precision="bf16" or fully_shard(..., '
                "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                "reduce_dtype=torch.float32))"
            )


def _param_group(module: FSDPModule) -> Any:
    """Return torch's own record of the parameters that this module shards, or None."""
    return module._get_fsdp_state()._fsdp_param_group


def _divisor(modules: Sequence[FSDPModule], ranks: int) -> float:
    """Return the number by which the engine divides: the ranks, unless the user set another."""
    for group in map(_param_group, modules):
        factor = getattr(group, "gradient_divide_factor", None)
        if factor is not None:
            return float(factor)
    return float(ranks)
