"""FSDP2 (`fully_shard`), with HSDP meshes: every rank holds a slice of every parameter.

Forward and backward run collectives of their own, so all ranks must run equally many micro-batches
(`counts_must_agree`). While the reduction is held back, FSDP2 keeps whole gradients; with
`sync="every"` it reduce-scatters after every micro-batch and keeps slices of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from wholebatch.distributed.process_group import Group
from wholebatch.distributed.sync_strategy import Parameters, Sync, reduces_in_backward_only
from wholebatch.errors import OptionError, UnsupportedError

_log = logging.getLogger("wholebatch")


class Sharded(Sync):
    """A model whose modules were passed through `fully_shard`."""

    counts_must_agree = True
    keeps_gradients = False
    grows_own_graph = True  # to the unsharded parameters

    def __init__(self, model: nn.Module, *, sync: str = "auto") -> None:
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
        plain = [
            n for n, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)
        ]
        if plain:
            raise UnsupportedError(
                f"{plain[0]} is not sharded, so no engine reduces its gradient: call "
                "fully_shard(model) on the root module too"
            )
        check_dtypes(model)
        mesh = _mesh(self._modules, parameters[0])
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self.use_group(Group(groups, torch.device(mesh.device_type), rank=dist.get_rank()))
        self.averaged_by = _divisor(self._modules, self.ranks)
        self._is_hybrid = mesh.ndim == 2
        self._found = [_switches(module) for module in self._modules]
        self._every, self.policy = self._choose(sync, parameters)

    def _choose(self, sync: str, parameters: Sequence[Tensor]) -> tuple[bool, str]:
        from wholebatch.core.readable_sizes import bytes_said
        from wholebatch.memory.budget import free_memory

        whole = sum(p.numel() * max(p.element_size(), 4) for p in parameters)
        slices = whole // self.ranks
        if sync in ("hold", "every"):
            every, why = sync == "every", "as asked"
        elif sync == "auto":
            device = parameters[0].device  # of the numbers too: nccl takes no others
            here = torch.tensor(-free_memory(device), dtype=torch.float64, device=device)
            free = int(-super().largest(here))
            every = whole - slices > free // 2
            why = (
                f"holding keeps {bytes_said(whole)} of whole gradients, "
                f"a rank has {bytes_said(free)} free"
                + (" and half of that is left for activations" if every else "")
            )
        else:
            raise OptionError(f'sync={sync!r}: must be "hold", "every" or "auto"')
        policy = (
            f"every: gradients are reduce-scattered after each micro-batch ({why})"
            if every
            else f"hold: gradients are reduced once per window ({why})"
        )
        if self.rank == 0:
            _log.info("sync %s", policy)
        return every, policy

    @contextmanager
    def backward(self, parameters: Parameters, *, reduces: bool, overlap: bool) -> Iterator[None]:
        for module in self._modules:
            module.set_requires_gradient_sync(reduces or self._every, recurse=False)
            if self._is_hybrid:
                module.set_requires_all_reduce(reduces, recurse=False)
        if self.progress is not None:
            self.progress.mark()
        with self.failures():
            yield

    def reduce_now(self, parameters: Parameters) -> None:
        raise reduces_in_backward_only("a sharded model")

    def largest(self, value: Tensor) -> Tensor:
        found = super().largest(value)
        if self.progress is not None:  # ranks have agreed on a window: its forwards wait for them
            self.progress.mark()
        return found

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def restore(self) -> None:
        super().restore()
        for module, (gradient_sync, all_reduce) in zip(self._modules, self._found, strict=True):
            module.set_requires_gradient_sync(gradient_sync, recurse=False)
            if self._is_hybrid:
                module.set_requires_all_reduce(all_reduce, recurse=False)


def check_dtypes(model: nn.Module) -> None:
    """Refuse 16-bit parameters: FSDP2 keeps gradients in their dtype, and sums would be rounded."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            raise UnsupportedError(
                f"{name} is {parameter.dtype}, and FSDP2 would round the sum of its gradients to "
                "that after every reduction: keep the parameters in float32, and compute in 16 bit "
                'by precision="bf16" or fully_shard(..., mp_policy=MixedPrecisionPolicy('
                "param_dtype=torch.bfloat16, reduce_dtype=torch.float32))"
            )


def _param_group(module: FSDPModule) -> Any:
    """Return torch's own record of the parameters that this module shards, or None."""
    return module._get_fsdp_state()._fsdp_param_group


def _mesh(modules: Sequence[FSDPModule], parameter: DTensor) -> Any:
    for group in map(_param_group, modules):
        if group is not None:
            return group.mesh_info.mesh
    return parameter.device_mesh


def _divisor(modules: Sequence[FSDPModule], ranks: int) -> float:
    """Return the number by which the engine divides: the ranks, unless the user set another."""
    for group in map(_param_group, modules):
        factor = getattr(group, "gradient_divide_factor", None)
        if factor is not None:
            return float(factor)
    return float(ranks)


def _switches(module: FSDPModule) -> tuple[bool, bool]:
    """Return the module's present settings: gradient sync, and all-reduce between replicas."""
    group = _param_group(module)
    if group is None:
        return True, True
    return bool(group.reduce_grads), bool(group.all_reduce_grads)
