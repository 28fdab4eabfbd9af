"""A loss that compares rows of the model's outputs with each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from wholebatch.audit.check import Check, LossOfMicroBatch, silenced
from wholebatch.batch.samples import tensors_of
from wholebatch.window.autograd_graph import graph_nodes
from wholebatch.window.replaced_attributes import emptied

_MARK = "wholebatch.rows"
_MOST_ELEMENTS = 1 << 24
_LINKED = 1e-6


class ComparedRows(Check):
    """Warn of a loss whose gradient by one row of a model's output depends on another row.

    Asked by a second derivative of the loss by the outputs; only where the units are as many as
    the rows, which may be no samples all the same.
    """

    def returned(self, given: Any, output: Any) -> None:
        """Mark what a model has returned, in its graph: nothing is kept alive."""
        rows = next((len(tensor) for tensor in tensors_of(given) if tensor.dim()), 0)
        for tensor in tensors_of(output):
            node: Any = tensor.grad_fn
            if node is None or not tensor.dim() or not 1 < len(tensor) == rows:
                continue
            if tensor.dim() > 2 and tensor.shape[1] == rows:
                continue  # the states of a recurrent layer: [layers, samples, ...]
            if tensor.is_floating_point() and tensor.numel() <= _MOST_ELEMENTS:
                node.metadata[_MARK] = (rows, tensor.output_nr, ref(tensor))

    def loss_is_known(self, micro: LossOfMicroBatch) -> Iterable[str]:
        marked: dict[Any, Any] = {}
        for node in _nodes_above_marks(micro.loss):
            if _MARK in node.metadata:
                marked[node] = node.metadata[_MARK]
            elif isinstance(node, BackwardCFunction):  # it may change what it has saved
                return []
        inner = {child for node in marked for child, _ in node.next_functions}
        below = set(graph_nodes(inner)) if len(marked) > 1 else set()
        outputs, hooks = [], []
        for node, (rows, place, held) in marked.items():
            tensor = held()
            if rows != micro.number or (tensor is not None and tensor.retains_grad):
                continue
            if node not in below:  # a BatchNorm may be between them
                outputs.append(GradientEdge(node, place))
                hooks.append(None if tensor is None else tensor._backward_hooks)
        if not outputs:
            return []
        rows = int(micro.number)
        with emptied(hooks):
            linked = _linked_rows(micro.loss, outputs, rows)
        if linked < 2:
            return []
        begin = f"this loss links {linked} of the {rows} rows of the model's output"
        return [
            f"{begin}, and units={rows} counts each of them. If samples are compared with others, "
            "which a micro-batch may cut off, use WholeBatch with loss=wb.Coupled(encode, loss). "
            "If the rows of a micro-batch belong together (the nodes of one graph, the tokens of "
            f"one text), nothing is wrong; {silenced(begin)}"
        ]


def _nodes_above_marks(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of a loss down to the outputs that are marked, these included."""
    waiting: list[Any] = [loss.grad_fn]
    visited: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        if _MARK not in node.metadata:
            waiting.extend(child for child, _ in node.next_functions)


def _linked_rows(loss: Tensor, outputs: list[GradientEdge], rows: int) -> int:
    """Return how many rows move the gradient of the row in the middle."""
    try:
        with torch.enable_grad(), torch.autocast(loss.device.type, enabled=False):
            gradients = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            asked = [_mixed(g[rows // 2]) for g in gradients if g is not None]
            total = torch.stack(asked).sum()
            if not total.requires_grad:  # the loss is linear in the outputs
                return 0
            moved = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError):  # an operation without a second derivative
        return 0
    sizes = [m.nan_to_num().abs().reshape(rows, -1).amax(1) for m in moved if m is not None]
    if not sizes:
        return 0
    size = torch.stack([each.double() for each in sizes]).amax(0)
    size[rows // 2] = size.max()
    return int((size > _LINKED * size.max()).sum()) if size.max() > 0 else 0


def _mixed(row: Tensor) -> Tensor:
    """Return one number of a row's gradient, in which no two elements have the same weight."""
    places = torch.arange(row.numel(), device=row.device)
    wide = row.dtype if row.dtype is torch.float64 else torch.float32
    return (row.flatten().to(wide) * (places * 1.7 + 0.3).cos().to(wide)).sum()
