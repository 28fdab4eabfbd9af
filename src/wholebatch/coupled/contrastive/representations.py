"""The tensors that `encode` returns: of one micro-batch, and joined over all of them.

---
A differentiable gather of a tensor's rows from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholebatch.distributed import Sync
from wholebatch.errors import LossError

__all__ = ["Gathered", "Leaves", "Tree"]


@dataclass(frozen=True)
class Tree:
    """The tensors that `encode` returned for one micro-batch, in order, and their structure."""

    tensors: list[Tensor]
    shape: Any

    @classmethod
    def of(cls, given: Any) -> Tree:
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

        shape = take(given)
        if not tensors:
            raise LossError("encode returned no tensor: return the representations of its samples")
        return cls(tensors, shape)

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """Return the same structure with other tensors."""

        def put(node: Any) -> Any:
            if node is None:
                return None
            if isinstance(node, int):
                return tensors[node]
            if isinstance(node, dict):
                return {key: put(value) for key, value in node.items()}
            return type(node)(put(value) for value in node)

        return put(self.shape)

    def detached(self) -> Tree:
        """Return the same structure with detached tensors."""
        return Tree([tensor.detach() for tensor in self.tensors], self.shape)

    def is_finite(self) -> Tensor:
        """Return True as a tensor if all values are finite, without waiting for the device."""
        checks = [tensor.isfinite().all() for tensor in self.tensors if tensor.is_floating_point()]
        return torch.stack([c.to(checks[0].device) for c in checks]).all() if checks else _true()


class Leaves:
    """The tensors joined over all micro-batches, without their graphs; numbers become vectors."""

    def __init__(self, tree: Tree, tensors: list[Tensor], rows: list[list[int]]) -> None:
        self.tree = tree
        self.tensors = tensors
        self.dtypes = [tensor.dtype for tensor in tensors]
        self._ends = rows

    @classmethod
    def of(cls, trees: list[Tree]) -> Leaves:
        """Join the trees and empty them on the way, so that representations are held once."""
        shape = trees[0].shape
        for tree in trees:
            if tree.shape != shape:
                raise LossError(
                    "encode returned another structure for another micro-batch: all must have the "
                    "same keys and lengths"
                )
        joined: list[Tensor] = []
        ends: list[list[int]] = []
        for place in range(len(trees[0].tensors)):
            parts = [_as_rows(tree.tensors[place].detach()) for tree in trees]
            for tree in trees:
                tree.tensors[place] = torch.empty(0)
            stops = [0]
            for part in parts:
                stops.append(stops[-1] + len(part))
            whole = torch.cat(parts)
            del parts
            joined.append(whole.requires_grad_(whole.is_floating_point()))
            ends.append(stops)
        return cls(Tree([], shape), joined, ends)

    def rows(self, index: int) -> int:
        """Return the number of rows that this micro-batch has in the first tensor."""
        start, stop = self._ends[0][index : index + 2]
        return stop - start

    def distances(self, index: int, tree: Tree) -> Iterator[Tensor]:
        """Yield the relative distance of each representation from that of the first pass."""
        self._check(tree)
        for place, tensor in enumerate(tree.tensors):
            if tensor.is_floating_point():
                yield _distance(_as_rows(tensor.detach()), self._rows(place, index))

    def gradients(self, index: int, tree: Tree) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of this micro-batch that require gradients, and their gradients."""
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for place, tensor in enumerate(tree.tensors):
            gradient = self.tensors[place].grad
            if gradient is not None and tensor.requires_grad:
                start, stop = self._ends[place][index : index + 2]
                outputs.append(tensor)
                gradients.append(gradient[start:stop].view_as(tensor))
        return outputs, gradients

    def _check(self, tree: Tree) -> None:
        if tree.shape != self.tree.shape:
            raise LossError("encode returned another structure the second time")

    def _rows(self, place: int, index: int) -> Tensor:
        start, stop = self._ends[place][index : index + 2]
        return self.tensors[place].detach()[start:stop]


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _true() -> Tensor:
    return torch.tensor(True)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return `‖a - b‖ / ‖b‖`, or infinity if the shapes differ."""
    if a.shape != b.shape:
        return torch.tensor(float("inf"), dtype=torch.float64)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    gap = torch.linalg.vector_norm(a.to(wide) - b.to(wide))
    size = torch.linalg.vector_norm(b.to(wide)).clamp_min(torch.finfo(wide).tiny)
    distance: Tensor = (gap / size).double()
    return distance


class Gathered:
    """A differentiable gather along the first dimension (the samples), in the order of the ranks.

    Ranks may have different numbers of samples. The backward sums the gradients of all ranks for
    each row, so a loss that every rank computes must be divided by the number of ranks.
    """

    def __init__(self, sync: Sync) -> None:
        self._sync = sync

    def __call__(self, tensor: Tensor) -> Tensor:
        sync = self._sync
        counts = [0.0] * sync.ranks
        counts[sync.rank] = float(len(tensor))
        sizes = [int(size) for size in sync.sum(counts)]
        start = sum(sizes[: sync.rank])
        if not tensor.is_floating_point():
            wide = tensor.to(torch.int64) if tensor.dtype is torch.bool else tensor
            return _spread(wide, start, sum(sizes), sync.sum_tensor).to(tensor.dtype)
        gathered: Tensor = _Gather.apply(tensor, start, sum(sizes), sync.sum_tensor)  # type: ignore[no-untyped-call]
        return gathered


def _spread(tensor: Tensor, start: int, rows: int, summed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rows of all ranks: place own rows among zeros and sum over ranks, exactly."""
    whole = tensor.new_zeros((rows, *tensor.shape[1:]))
    whole[start : start + len(tensor)] = tensor
    return summed(whole)


class _Gather(torch.autograd.Function):
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
