"""Sums of gradients on the host, one for each parameter, in buckets; and their norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wholebatch.core.precision import SIXTEEN_BIT
from wholebatch.offload.parameter_buckets import BUCKET_BYTES, bucket_bytes, in_buckets, in_shape_of

_SLAB_BYTES = 2**28
_ROW = 256
_PIECE = 2**12 * _ROW


@dataclass(eq=False)
class Bucket:
    """Some parameters of one optimizer, dtype and device, with their sums in one row."""

    optimizer: int
    parameters: list[nn.Parameter]
    flat: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.parameters]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sums."""
        dtype = self.parameters[0].dtype
        return torch.float32 if dtype in SIXTEEN_BIT else dtype


class HostSums:
    """One sum for each parameter, in float32 or better; pinned where a CUDA device fills them.

    The memory is allocated once. `filled` are the ids of the parameters that have a sum in this
    window.
    """

    def __init__(self, optimizers: Sequence[Sequence[nn.Parameter]]) -> None:
        everyone = [p for parameters in optimizers for p in parameters]
        most = bucket_bytes(everyone, BUCKET_BYTES["host"])
        self.buckets = [
            Bucket(index, some)
            for index, parameters in enumerate(optimizers)
            for some in in_buckets(parameters, most)
        ]
        self.filled: set[int] = set()
        self._of: dict[int, Tensor] = {}
        slabs = _Slabs(sum(sum(b.sizes) * b.dtype.itemsize for b in self.buckets))
        for bucket in self.buckets:
            pinned = bucket.device.type == "cuda"
            bucket.flat = slabs.take(sum(bucket.sizes), bucket.dtype, pinned=pinned)
            rows = bucket.flat.split(bucket.sizes)
            self._of.update(zip(map(id, bucket.parameters), rows, strict=True))
        self.bytes = slabs.taken

    @classmethod
    def of(
        cls, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> HostSums:
        """Make sums for these parameters, in the optimizers' order."""
        mine = {id(parameter) for parameter in parameters}
        return cls(
            [
                [p for group in o.param_groups for p in group["params"] if id(p) in mine]
                for o in optimizers
            ]
        )

    def is_for(self, parameters: Sequence[nn.Parameter]) -> bool:
        """True if there are sums for exactly these parameters."""
        return len(parameters) == len(self._of) and all(id(p) in self._of for p in parameters)

    def flat(self, parameter: nn.Parameter) -> Tensor:
        """Return the sum of a parameter as one row, in the parameter's order of memory."""
        return self._of[id(parameter)]

    def shaped(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum in the parameter's shape, or None if it has none in this window."""
        if id(parameter) not in self.filled:
            return None
        return in_shape_of(parameter, self._of[id(parameter)])


class _Slabs:
    """Host memory in large pieces: pinning is slow, and rounds each piece up to a power of two."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._rest: dict[bool, Tensor] = {}
        self.taken = 0

    def take(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        size = -(-numel * dtype.itemsize // 64) * 64
        rest = self._rest.get(pinned)
        if rest is None or size > len(rest):
            fresh = max(size, min(_SLAB_BYTES, self._left + 64))
            rest = torch.empty(fresh, dtype=torch.uint8, pin_memory=pinned)
            self.taken += fresh
        self._rest[pinned] = rest[size:]
        self._left -= size
        return rest[: numel * dtype.itemsize].view(dtype)


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all gradients, in float64, from the norms of short rows.

    On the CPU the norm of a long float32 tensor loses digits with its length (4e-4 for a million
    equal numbers); short rows, added up in float64, keep them (2e-7) and are as fast.
    """
    norms = on_host([norm_of_row(_row(gradient)) for gradient in gradients])
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if not bool(torch.isfinite(total)):  # squares overflow in float32 where numbers do not
        wide = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        total = torch.linalg.vector_norm(torch.stack(on_host(wide)))
    return total


def norm_of_row(row: Tensor) -> Tensor:
    """Return the norm of a flat tensor, in float64."""
    if row.dtype is not torch.float32:
        wide: Tensor = torch.linalg.vector_norm(row, dtype=torch.float64)
        return wide
    even = row.numel() - row.numel() % _ROW
    norms = [
        torch.linalg.vector_norm(torch.linalg.vector_norm(piece.view(-1, _ROW), dim=1).double())
        for piece in row[:even].split(_PIECE)
        if piece.numel()
    ]
    norms.append(torch.linalg.vector_norm(row[even:], dtype=torch.float64))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _row(gradient: Tensor) -> Tensor:
    """Return the elements in any order, without a copy if they lie side by side."""
    if torch.ops.aten.is_non_overlapping_and_dense(gradient):
        return gradient.as_strided((gradient.numel(),), (1,))
    return gradient.reshape(-1)


def on_host(norms: Sequence[Tensor]) -> list[Tensor]:
    """Return these numbers on the host, by one transfer for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm)
    return [one for some in by_device.values() for one in torch.stack(some).cpu().unbind()]
