"""The reference that every claim is held against: the undivided batch, by plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from wholebatch.options import Close, Memory
from wholebatch.options import samples as read_as
from wholebatch.tune import NoiseProbe

EXACT = 1e-12


def mlp(features: int = 5, classes: int = 3, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, classes)
    ).to(dtype)


def samples(
    number: int, features: int = 5, classes: int = 3, *, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(number, features, generator=generator, dtype=dtype),
        "y": torch.randint(0, classes, (number,), generator=generator),
    }


def pieces(batch: dict[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    parts = {name: leaf.split(list(sizes)) for name, leaf in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]


def summed(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")


def mean(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"])


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def knows_grad_scale(hook: Any) -> None:
    """Let a hook pass for one of the package's own, which know where the factor is."""
    hook.__module__ = "wholebatch.tests"


class Seen:
    """Watches an optimizer: the gradients that each of its steps saw."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.gradients: list[list[Tensor]] = []

        def look(*_: Any) -> None:
            scale = getattr(optimizer, "grad_scale", None)
            factor = 1.0 if scale is None else 1.0 / float(scale)
            self.gradients.append(
                [
                    torch.zeros_like(p) if p.grad is None else p.grad.to_dense() * factor
                    for p in model.parameters()
                ]
            )

        knows_grad_scale(look)
        optimizer.register_step_pre_hook(look)


def distance(ours: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """Relative L2 distance over all tensors together."""
    pairs = list(zip(ours, reference, strict=True))
    above = sum(float((a.detach().double() - b.detach().double()).square().sum()) for a, b in pairs)
    below = sum(float(b.detach().double().square().sum()) for _, b in pairs)
    return float((above / below) ** 0.5) if below else float(above)


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Whole:
    """Plain torch on undivided batches: the update that must be matched."""

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer = sgd,
        *,
        loss: Callable[[nn.Module, Any], Tensor] = mean,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.start = copy.deepcopy(model)
        self.model = copy.deepcopy(model)
        self.optimizer = make(self.model)
        self.seen = Seen(self.model, self.optimizer)
        self.loss = loss
        self.clip_norm, self.clip_value = clip_norm, clip_value

    def step(self, batch: Any) -> float:
        loss = self.loss(self.model, batch)
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.clip_value)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def updates(self) -> list[Tensor]:
        return [
            after.detach() - before.detach()
            for after, before in zip(self.model.parameters(), self.start.parameters(), strict=True)
        ]

    def assert_same(
        self, model: nn.Module, seen: Seen | None = None, at_most: float = EXACT
    ) -> None:
        """Gradients of every step and the whole update are those of the undivided batches."""
        update = [
            after.detach() - before.detach()
            for after, before in zip(model.parameters(), self.start.parameters(), strict=True)
        ]
        assert distance(update, self.updates()) <= at_most
        if seen is not None:
            assert len(seen.gradients) == len(self.seen.gradients)
            for ours, theirs in zip(seen.gradients, self.seen.gradients, strict=True):
                assert distance(ours, theirs) <= at_most


def trained(model: nn.Module, acc: wb.Accumulator, micros: Any) -> list[wb.Step]:
    """One pass of an Accumulator over micro-batches of `samples`; the steps that it made."""
    steps = []
    for micro in acc.over(micros):
        step = acc.backward(summed(model, micro), units=len(micro["y"]))
        if step is not None:
            steps.append(step)
    tail = acc.last_step  # of a short last window, which closes when the loader has ended
    return steps if tail in steps or tail is None else [*steps, tail]


def measured(*arguments: Any, noise: Any = 1, **options: Any) -> wb.WholeBatch:
    """A WholeBatch that measures the gradient noise scale, by default in every window."""
    train = wb.WholeBatch(*arguments, **grouped(options))
    if noise is not None:
        NoiseProbe(train, noise)
    return train


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Group options of a flat table, with those of `Close`, `Memory` and `samples` among them."""
    rest = dict(options)

    def taken(*names: str) -> dict[str, Any]:
        return {name: rest.pop(name) for name in names if name in rest}

    if close := taken(*(field.name for field in fields(Close))):
        rest["close"] = Close(**close)
    if memory := taken("optimizer_state"):
        rest["memory"] = Memory(rest.get("memory"), **memory)
    if layout := taken("batch_size", "static"):
        rest["micro_batch"] = read_as(rest.get("micro_batch", "auto"), **layout)
    return rest
