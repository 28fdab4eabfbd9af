"""Tensor parallelism (`parallelize_module`): ranks of a mesh hold slices of single parameters.

All ranks of the mesh work on the same batch, and their forwards and backwards run collectives of
their own. So there is nothing to reduce and nothing to count over them. Only the norm of the
gradient is taken over their slices. Data-parallel replicas beside it are FSDP2's
(`fully_shard(model, mesh=mesh["dp"])`), which counts over its own dimension of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from wholebatch.distributed.sync_strategy import Local


class TensorParallel(Local):
    """A model with DTensor parameters, without data-parallel replicas."""

    @property
    def takes_graphs(self) -> bool:
        """False: collectives run in the forwards, by eager code."""
        return False

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return norm_over_meshes(gradients)


def norm_over_meshes(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over gradients that may be on several meshes, the same on every rank."""
    by_mesh: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    norms = []
    for alike in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(alike)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
