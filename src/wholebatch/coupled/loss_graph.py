"""Find from the graph of a loss which samples of a micro-batch it compares with each other.

A loss that is a sum over its samples has a gradient for the output of sample i that depends on the
outputs of sample i alone. So the derivative of that gradient by the output of any other sample is
zero:

    d/dz_j (d total / d z_i) = 0    for every j that is not of the same unit as i

Rows that are not zero are linked. Linked rows form parts (a pair of DPO, a list of a ranking), and
the loss must have at least as many parts as it has units. A contrastive loss has one.

Only the graph between the model's outputs and the loss is differentiated. Nothing is added to any
`.grad`, and the graph is kept for the backward that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = ["Output", "linked_samples"]

_MOST_ELEMENTS = 1 << 24
_MOST_ROWS = 1 << 13
_MOST_NODES = 1 << 13
_MOST_PASSES = 64
_TOLERANCE = 1e-6

_Row = tuple[int, int]  # the number of rows of an output, and which of them


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a model gave back, and which of its dimensions counts the samples."""

    tensor: Tensor
    dim: int = 0

    @property
    def rows(self) -> int:
        return self.tensor.shape[self.dim]


def linked_samples(total: Tensor, outputs: Sequence[Tensor], units: float) -> list[int] | None:
    """Return the samples that the loss links with one of them; [] if it has enough parts.

    `outputs` have one row for each sample in their first dimension. [] is also returned where it
    cannot be told: the loss does not depend on these outputs, or its graph cannot be differentiated
    twice. None: the outputs have one row, and another micro-batch may tell more.
    """
    if all(tensor.shape[0] == 1 for tensor in outputs):
        return None
    watched = [Output(tensor) for tensor in _distinct(outputs) if _can_be_asked(tensor)]
    nodes: set[Any] = {output.tensor.grad_fn for output in watched}
    if not watched or not _can_run_again(total, nodes):
        return []
    for cut in (False, True):
        try:
            with _without_hooks(o.tensor for o in watched), _cut_at(nodes if cut else ()):
                return _linked(total, watched, units)
        except (RuntimeError, NotImplementedError):  # an operation without a second derivative
            continue  # It may lie between two outputs, and not between them and the loss.
    return []


def _linked(total: Tensor, watched: Sequence[Output], units: float) -> list[int]:
    linked = _Links(total, watched).beyond(units)
    others = [_time_first(output, units) for output in watched]
    if linked and others != watched:  # [time, samples, ...]: the rows may be time steps
        return linked if _Links(total, others).beyond(units) else []
    return linked


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _can_be_asked(tensor: Tensor) -> bool:
    """True for an output of a graph whose gradient can be taken without anybody noticing."""
    return (
        tensor.grad_fn is not None
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.dim() > 0
        and 1 < tensor.shape[0] <= _MOST_ROWS
        and tensor.numel() <= _MOST_ELEMENTS
        and not tensor.retains_grad
    )


def _time_first(output: Output, units: float) -> Output:
    """The same output read as [time, samples, ...], where its shape and the units allow that."""
    shape = output.tensor.shape
    if len(shape) < 3 or shape[1] < 2:
        return output
    by_units = shape[1] == units or (len(shape) == 3 and shape[0] < units <= shape[0] * shape[1])
    return Output(output.tensor, 1) if by_units or shape[0] == shape[1] else output


def _can_run_again(total: Tensor, until: set[Any]) -> bool:
    """False if a function of somebody's own lies on the way: it may change what it has saved."""
    waiting: list[Any] = [total.grad_fn]
    seen = set(until)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction) or len(seen) > _MOST_NODES:
            return False
        seen.add(node)
        waiting += [below for below, _ in node.next_functions]
    return True


class _Links:
    """The rows of outputs, and which of them the loss links."""

    def __init__(self, total: Tensor, outputs: Sequence[Output]) -> None:
        with _plain(total):
            made = torch.autograd.grad(
                total, [o.tensor for o in outputs], create_graph=True, allow_unused=True
            )
        found = [(o, g) for o, g in zip(outputs, made, strict=True) if g is not None]
        found = [(o, g) for o, g in found if bool(g.isfinite().all())]
        self._total = total
        self._outputs = [output for output, _ in found]
        self._slopes = [slope for _, slope in found]
        self._parents: dict[_Row, _Row] = {}
        self._asked: set[_Row] = set()

    def beyond(self, units: float) -> list[int]:
        """Return the rows linked with one another if there are fewer parts than units."""
        sizes = sorted({output.rows for output in self._outputs})
        first = [(size, row) for size in sizes for row in (0, size // 2)]
        for row in first:
            linked = self._linked_beyond(row, sizes, units)
            if linked:
                return linked
        if not self._parents:
            return []  # no row is linked with another
        for row in self._rest(sizes):
            linked = self._linked_beyond(row, sizes, units)
            if linked or len(self._asked) >= _MOST_PASSES:
                return linked
        return []

    def _rest(self, sizes: Sequence[int]) -> Iterable[_Row]:
        """First the rows that are linked already (more come while they are asked), then others."""
        yield from (row for row in list(self._parents) if row not in self._asked)
        for size in sizes:
            yield from ((size, row) for row in range(size) if (size, row) not in self._asked)

    def _linked_beyond(self, row: _Row, sizes: Sequence[int], units: float) -> list[int]:
        for other in self._links_of(row):
            self._join(row, other)
        for size in sizes:
            roots = {self._root((size, index)) for index in range(size)}
            if len(roots) < min(int(units), size):
                own = self._root(row)
                return [i for i in range(row[0]) if self._root((row[0], i)) == own]
        return []

    def _links_of(self, row: _Row) -> list[_Row]:
        """Return the rows whose outputs move the gradient of this one."""
        self._asked.add(row)
        with _plain(self._total):
            mixed = [
                _mixed(slope.select(output.dim, row[1]))
                for output, slope in zip(self._outputs, self._slopes, strict=True)
                if output.rows == row[0]
            ]
            asked = torch.stack(mixed).sum()
            if not asked.requires_grad:  # a loss that is linear in the outputs
                return []
            tensors = [output.tensor for output in self._outputs]
            moved = torch.autograd.grad(asked, tensors, retain_graph=True, allow_unused=True)
        sizes = [
            None
            if m is None
            else m.nan_to_num().abs().movedim(o.dim, 0).reshape(o.rows, -1).amax(1)
            for o, m in zip(self._outputs, moved, strict=True)
        ]
        largest = max((float(size.max()) for size in sizes if size is not None), default=0.0)
        found: list[_Row] = []
        for output, size in zip(self._outputs, sizes, strict=True):
            if size is not None and largest:
                rows = (size > _TOLERANCE * largest).nonzero().flatten().tolist()
                found += [(output.rows, index) for index in rows]
        return [other for other in found if other != row]

    def _root(self, row: _Row) -> _Row:
        while row in self._parents and self._parents[row] != row:
            row = self._parents[row]
        return row

    def _join(self, a: _Row, b: _Row) -> None:
        a, b = self._root(a), self._root(b)
        self._parents.setdefault(a, a)
        self._parents[b] = a


def _mixed(slope: Tensor) -> Tensor:
    """One number of a row's gradient, in which no two elements have the same weight."""
    places = torch.arange(slope.numel(), device=slope.device)
    wide = slope.dtype if slope.dtype is torch.float64 else torch.float32
    return (slope.flatten().to(wide) * (places * 1.7 + 0.3).cos().to(wide)).sum()


@contextmanager
def _without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Take off the hooks of tensors (Fabric's, for one): they would run once too often."""
    found = [hooks for tensor in tensors if (hooks := tensor._backward_hooks)]
    taken = [dict(hooks) for hooks in found]
    for hooks in found:  # autograd holds the dictionary itself
        hooks.clear()
    try:
        yield
    finally:
        for hooks, back in zip(found, taken, strict=True):
            hooks.update(back)


@contextmanager
def _cut_at(nodes: Iterable[Any]) -> Iterator[None]:
    """Let no gradient go on from the outputs that these nodes made: to another output, upstream."""
    handles = [node.register_prehook(lambda slopes: (None,) * len(slopes)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _plain(total: Tensor) -> Iterator[None]:
    """Differentiate as a backward does: with a graph, and without autocast."""
    with torch.enable_grad(), torch.autocast(total.device.type, enabled=False):
        yield
