"""Sums of gradients on the host: one for each parameter, side by side in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wholebatch.core.precision import SIXTEEN_BIT

__all__ = [
    "Bucket",
    "Sums",
    "bucket_bytes",
    "flat_of",
    "like",
    "norm_of_row",
    "on_host",
    "total_norm",
]

_BUCKET_BYTES = 64 * 2**20
_SMALLEST_BUCKET = 2**18
_SLAB_BYTES = 2**28


@dataclass(eq=False)
class Bucket:
    """Some parameters of one optimizer, dtype and device, with their sums in one piece."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    flat: Tensor = field(default_factory=lambda: torch.empty(0))
    optimizer: int = 0

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


class Sums:
    """One sum for each parameter, in float32 or better; pinned where a CUDA device fills them.

    Memory for them is taken once. `filled` are the parameters (by id) that have one in this window.
    """

    def __init__(self, optimizers: Sequence[Sequence[nn.Parameter]]) -> None:
        self.buckets = _layout(optimizers)
        self.filled: set[int] = set()
        self.bytes = 0
        slabs = _Slabs(sum(bucket.numel * _dtype(bucket).itemsize for bucket in self.buckets))
        self._of: dict[int, Tensor] = {}
        for bucket in self.buckets:
            pinned = bucket.parameters[0].device.type == "cuda"
            bucket.flat = slabs.take(bucket.numel, _dtype(bucket), pinned=pinned)
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for parameter, flat in zip(bucket.parameters, bucket.flat.split(sizes), strict=True):
                self._of[id(parameter)] = flat
        self.bytes = slabs.taken

    @classmethod
    def of(
        cls, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sums:
        """Those of the parameters, in the order in which the optimizers have them."""
        mine = {id(parameter) for parameter in parameters}
        return cls(
            [
                [p for group in o.param_groups for p in group["params"] if id(p) in mine]
                for o in optimizers
            ]
        )

    def is_for(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether exactly these parameters have their place here."""
        return len(parameters) == len(self._of) and all(id(p) in self._of for p in parameters)

    def flat(self, parameter: nn.Parameter) -> Tensor:
        """The sum of this parameter, in the order of the parameter's own memory."""
        return self._of[id(parameter)]

    def shaped(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum in the parameter's shape; None where it has none in this window."""
        if id(parameter) not in self.filled:
            return None
        return like(parameter, self._of[id(parameter)])


def bucket_bytes(parameters: Iterable[Tensor], most: int) -> int:
    """How large a bucket is: a sixteenth of all gradients, so that a small model gains too."""
    total = sum(p.numel() * max(4, p.element_size()) for p in parameters)
    return min(most, max(_SMALLEST_BUCKET, total // 16))


def like(parameter: Tensor, flat: Tensor) -> Tensor:
    """`flat` seen in the shape of the parameter, with its order of memory."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride())


def flat_of(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient as one row, in the order of the parameter's memory."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return gradient.reshape(-1)
    if gradient.stride() != parameter.stride():
        ordered = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device
        )
        gradient = ordered.copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie side by side in memory, in whatever order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _dtype(bucket: Bucket) -> torch.dtype:
    dtype = bucket.parameters[0].dtype
    return torch.float32 if dtype in SIXTEEN_BIT else dtype


def _layout(optimizers: Sequence[Sequence[nn.Parameter]]) -> list[Bucket]:
    """Neighbours together, as long as they fit; one that does not fit has its own bucket."""
    buckets: list[Bucket] = []
    most = bucket_bytes([p for parameters in optimizers for p in parameters], _BUCKET_BYTES)
    for index, parameters in enumerate(optimizers):
        filling: dict[tuple[torch.dtype, torch.device], tuple[Bucket, int]] = {}
        for parameter in parameters:
            key = (parameter.dtype, parameter.device)
            size = parameter.numel() * max(4, parameter.element_size())
            bucket, filled = filling.get(key, (None, 0))
            if bucket is None or filled + size > most:
                bucket, filled = Bucket(optimizer=index), 0
                buckets.append(bucket)
            bucket.parameters.append(parameter)
            filling[key] = (bucket, filled + size)
    return buckets


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


_ROW = 256
_PIECE = 2**12 * _ROW


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm over all gradients, in float64, from the norms of short rows.

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
    """The norm of a flat tensor, in float64."""
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
    """Its elements in whatever order, without a copy where they lie side by side."""
    if gradient.is_contiguous():
        return gradient.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(gradient):
        return gradient.as_strided((gradient.numel(),), (1,))
    return gradient.reshape(-1)


def on_host(norms: Sequence[Tensor]) -> list[Tensor]:
    """These numbers, wherever they are: one transfer for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm)
    return [one for some in by_device.values() for one in torch.stack(some).cpu().unbind()]
