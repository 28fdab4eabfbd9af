"""The representations that `encode` returns: of one micro-batch, of all of them, of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wholebatch.distributed import Sync
from wholebatch.errors import LossError


@dataclass(frozen=True)
class Representations:
    """The tensors that `encode` returned for one micro-batch, in order, and their structure."""

    tensors: list[Tensor]
    structure: Any
    """The containers that `encode` returned, with an index in place of every tensor."""

    @classmethod
    def of(cls, given: Any) -> Representations:
        tensors: list[Tensor] = []

        def take(node: Any) -> Any:
            if isinstance(node, (int, float)):
                node = torch.tensor(float(node))
            if isinstance(node, Tensor):
                tensors.append(node)
                return len(tensors) - 1
            if node is None:
                return None
            if isinstance(node, Mapping):
                return {key: take(value) for key, value in node.items()}
            if isinstance(node, (tuple, list)):
                return type(node)(take(value) for value in node)
            raise LossError(
                f"encode returned {type(node).__name__}: must be a tensor, or a dict, tuple or "
                "list of tensors"
            )

        structure = take(given)
        if not tensors:
            raise LossError("encode returned no tensor: return the representations of its samples")
        return cls(tensors, structure)

    def detached(self) -> Representations:
        """Return the same structure with detached tensors."""
        return Representations([tensor.detach() for tensor in self.tensors], self.structure)

    def is_finite(self) -> Tensor:
        """Return True as a tensor if all values are finite, without waiting for the device."""
        checks = [tensor.isfinite().all() for tensor in self.tensors if tensor.is_floating_point()]
        if not checks:
            return torch.tensor(True)
        return torch.stack([check.to(checks[0].device) for check in checks]).all()


class WholeRepresentations:
    """The tensors joined over all micro-batches, without their graphs; numbers become vectors."""

    def __init__(self, parts: list[Representations]) -> None:
        """Join the parts and empty them on the way, so that representations are held once."""
        self._structure = parts[0].structure
        for part in parts:
            if part.structure != self._structure:
                raise LossError(
                    "encode returned another structure for another micro-batch: all must have the "
                    "same keys and lengths"
                )
        self.tensors: list[Tensor] = []
        self._ends: list[list[int]] = []
        for place in range(len(parts[0].tensors)):
            rows = [_as_rows(part.tensors[place].detach()) for part in parts]
            for part in parts:
                part.tensors[place] = torch.empty(0)
            self._ends.append(list(accumulate(map(len, rows), initial=0)))
            whole = torch.cat(rows)
            del rows
            self.tensors.append(whole.requires_grad_(whole.is_floating_point()))

    def for_loss(self, gather: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Return the tensors in the structure of `encode`; `gather` adds the rows of all ranks."""
        tensors = self.tensors if gather is None else [gather(tensor) for tensor in self.tensors]

        def put(node: Any) -> Any:
            if node is None:
                return None
            if isinstance(node, int):
                return tensors[node]
            if isinstance(node, dict):
                return {key: put(value) for key, value in node.items()}
            return type(node)(put(value) for value in node)

        return put(self._structure)

    def rows(self, index: int) -> int:
        """Return the number of rows that this micro-batch has in the first tensor."""
        start, stop = self._ends[0][index : index + 2]
        return stop - start

    def distances(self, index: int, again: Representations) -> Iterator[Tensor]:
        """Yield the relative distance of each representation from that of the first pass."""
        if again.structure != self._structure:
            raise LossError("encode returned another structure the second time")
        for place, tensor in enumerate(again.tensors):
            if tensor.is_floating_point():
                first = self.tensors[place].detach()[self._slice(place, index)]
                yield _distance(_as_rows(tensor.detach()), first)

    def gradients(self, index: int, again: Representations) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of this micro-batch that require gradients, and their gradients."""
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for place, tensor in enumerate(again.tensors):
            gradient = self.tensors[place].grad
            if gradient is not None and tensor.requires_grad:
                outputs.append(tensor)
                gradients.append(gradient[self._slice(place, index)].view_as(tensor))
        return outputs, gradients

    def _slice(self, place: int, index: int) -> slice:
        return slice(*self._ends[place][index : index + 2])


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return `‖a - b‖ / ‖b‖`, or infinity if the shapes differ."""
    if a.shape != b.shape:
        return torch.tensor(float("inf"), dtype=torch.float64)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    gap = torch.linalg.vector_norm(a.to(wide) - b.to(wide))
    size = torch.linalg.vector_norm(b.to(wide)).clamp_min(torch.finfo(wide).tiny)
    distance: Tensor = (gap / size).double()
    return distance


def gather_rows(tensor: Tensor, sync: Sync) -> Tensor:
    """Gather a tensor's rows from all ranks, in the order of the ranks, differentiably.

    Ranks may have different numbers of rows. The backward sums the gradients of all ranks for each
    row, so a loss that every rank computes must be divided by the number of ranks.
    """
    counts = [0.0] * sync.ranks
    counts[sync.rank] = float(len(tensor))
    sizes = [int(size) for size in sync.sum(counts)]
    start = sum(sizes[: sync.rank])
    if not tensor.is_floating_point():
        wide = tensor.to(torch.int64) if tensor.dtype is torch.bool else tensor
        return _spread(wide, start, sum(sizes), sync.sum_tensor).to(tensor.dtype)
    gathered: Tensor = _GatherRows.apply(tensor, start, sum(sizes), sync.sum_tensor)  # type: ignore[no-untyped-call]
    return gathered


def _spread(tensor: Tensor, start: int, rows: int, summed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rows of all ranks: place own rows among zeros and sum over ranks, exactly."""
    whole = tensor.new_zeros((rows, *tensor.shape[1:]))
    whole[start : start + len(tensor)] = tensor
    return summed(whole)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, start: int, rows: int, summed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.start, ctx.count, ctx.summed = start, len(tensor), summed
        return _spread(tensor, start, rows, summed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        summed = ctx.summed(gradient.contiguous())
        return summed[ctx.start : ctx.start + ctx.count], None, None, None
