"""A training problem: a model, a batch, and the loss that a user would write for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Sum(NamedTuple):
    """A loss given as a sum over units: `wb.Loss(total, units)`, `backward(total, units=)`."""

    value: Tensor
    units: Any


class Mean(NamedTuple):
    """A loss given as a mean over units: `wb.mean_loss`, `backward(mean=, units=)`."""

    value: Tensor
    units: Any


Given = Sum | Mean
Batch = dict[str, Any]
Forward = Callable[[nn.Module, Batch], Any]
LossOf = Callable[[nn.Module, Batch], Any]


@dataclass(frozen=True)
class Moment:
    """A place in a loop where a user's own line stands."""

    place: str  # "start", or "after backward"
    number: int  # of the micro-batch in its window
    last: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer
    micro: Batch | None = None


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def every(micro: Batch) -> Tensor:
    """Each sample counts once."""
    return torch.ones(len(next(iter(micro.values()))), dtype=torch.float64)


@dataclass(frozen=True)
class Task:
    """`losses(forward(model, micro), micro)` are the losses per unit; `weights` their units."""

    name: str
    model: nn.Module
    batch: Batch
    forward: Forward
    losses: Callable[[Any, Batch], Tensor]
    weights: Callable[[Batch], Tensor] = every
    loss: LossOf | None = None  # what a mistake (or a special case) puts in place of the default
    truth: Callable[[nn.Module, Batch], Tensor] | None = None  # the mean of the undivided batch
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    options: dict[str, Any] = field(default_factory=dict)  # of the interface
    random: bool = False  # draws numbers of its own, so that no two splits agree
    line: Callable[[Moment], None] | None = None  # a line of the user's own in the loop
    announced: Callable[[Batch], Any] | None = None  # `units=` where a interface counts before
    steps: int = 1  # micro-batches of a window, where a stream is told of them
    tolerance: float = 1e-12

    def sum(self, model: nn.Module, micro: Batch) -> Sum:
        """The correct loss: a sum over units."""
        losses = self.losses(self.forward(model, micro), micro)
        weights = self.weights(micro)
        return Sum((losses * weights).sum(), weights.sum())

    def units(self, micro: Batch) -> Any:
        """Count the units before any forward."""
        return self.weights(micro).sum() if self.announced is None else self.announced(micro)

    def given(self, model: nn.Module, micro: Batch) -> Any:
        return self.sum(model, micro) if self.loss is None else self.loss(model, micro)

    def mean(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of an undivided batch as plain torch would have it."""
        if self.truth is not None:
            return self.truth(model, batch)
        return quotient(self.given(model, batch))

    def but(self, **changes: Any) -> Task:
        return replace(self, **changes)


def quotient(given: Any) -> Tensor:
    if isinstance(given, Mean):
        return given.value
    if isinstance(given, Sum):
        return given.value / given.units
    if isinstance(given, Tensor):
        return given.mean()
    return given.total / given.units


def features(out: Any) -> Tensor:
    """One row of numbers for each sample, whatever the model returns."""
    first = out if isinstance(out, Tensor) else next(iter(out))
    if first.is_complex():
        first = torch.view_as_real(first)
    return first.flatten(1) if first.dim() > 1 else first[:, None]


def pieces(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """The batch in parts of these sizes; tensors and lists are cut, the rest is passed on."""
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    total = ends[-1]

    def cut(leaf: Any, begin: int, end: int) -> Any:
        if isinstance(leaf, dict):
            return {name: cut(inner, begin, end) for name, inner in leaf.items()}
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == total:
            return leaf[begin:end]
        return leaf[begin:end] if isinstance(leaf, list) and len(leaf) == total else leaf

    return [
        {name: cut(leaf, begin, end) for name, leaf in batch.items()}
        for begin, end in pairwise(ends)
    ]


def flat(model: nn.Module) -> Tensor:
    """All parameters in one vector, in float64 (complex ones as pairs)."""
    parts = []
    for parameter in model.parameters():
        value = parameter.detach()
        value = torch.view_as_real(value) if value.is_complex() else value
        parts.append(value.double().flatten())
    return torch.cat(parts)


def trajectory(task: Task, windows: int = 1) -> list[Tensor]:
    """The parameters before the first and after each update of the undivided batch."""
    optimizer = task.optimizer(task.model)
    states = [flat(task.model)]
    for _ in range(windows):
        task.mean(task.model, task.batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(flat(task.model))
    return states
