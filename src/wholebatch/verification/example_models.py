"""Small models with data to try a training loop on: a classifier and a language model.

Both take `model(micro["x"])` to logits with the classes last, and `micro["y"]` are the labels,
-100 where none counts; so one loop runs on both:

    logits = model(micro["x"])
    loss = F.cross_entropy(logits.flatten(0, -2), micro["y"].flatten())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch import batch_size_of
from wholebatch.batch.samples import layout_of
from wholebatch.losses.loss import Loss, cross_entropy

Micro = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and the micro-batches to train it on.

    `window(steps, even, rank)` are the micro-batches of one window on one rank: with the same
    number of units in each, or with very different ones.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any]
    window: Callable[[int, bool, int], list[Any]]


def loss(model: nn.Module, micro: Micro) -> Loss:
    """Return the cross-entropy as a sum over the labels that count."""
    return cross_entropy(model(micro["x"]), micro["y"])


def _mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5)
    )


class _TinyLM(nn.Module):
    """One block of causal attention over a vocabulary of 40."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.place = nn.Embedding(12, 24)
        self.norm = nn.LayerNorm(24)
        self.mix = nn.Linear(24, 72)
        self.out = nn.Linear(24, 24)
        self.read = nn.Linear(24, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.read(x + self.out(attended))
        return logits


def _lm() -> nn.Module:
    torch.manual_seed(2)
    return _TinyLM()


def _sizes(steps: int, even: bool, rank: int) -> list[int]:
    """Return 4, 4, 4, 4 or, for example, 5, 2, 7, 1: a mean of means is far from the mean."""
    if even:
        return [4] * steps
    uneven = [5, 2, 7, 1, 6, 3]
    return [uneven[(index + 2 * rank) % len(uneven)] for index in range(steps)]


def _points(steps: int, even: bool, rank: int) -> list[Micro]:
    """Return micro-batches of points in 12 dimensions and 5 classes."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        {
            "x": 2.0 * torch.randn(size, 12, generator=generator),
            "y": torch.randint(0, 5, (size,), generator=generator),
        }
        for size in _sizes(steps, even, rank)
    ]


def _texts(steps: int, even: bool, rank: int) -> list[Micro]:
    """Return micro-batches of three texts of 12 tokens, of which different numbers count."""
    generator = torch.Generator().manual_seed(200 + rank)
    counted = [8] * steps if even else [min(12, 2 * n - 1) for n in _sizes(steps, False, rank)]
    micros = []
    for count in counted:
        tokens = torch.randint(0, 40, (3, 13), generator=generator)
        labels = tokens[:, 1:].masked_fill(torch.arange(12) >= count, -100)
        micros.append({"x": tokens[:, :-1].clone(), "y": labels})
    return micros


ZOO: dict[str, Case] = {
    "mlp": Case("mlp", _mlp, loss, _points),
    "lm": Case("lm", _lm, loss, _texts),
}
"""The built-in cases by name."""


def thinned(micros: Sequence[Any]) -> list[Any]:
    """Return the micro-batches with very different numbers of samples, if they have several."""
    result = []
    for index, micro in enumerate(micros):
        size = batch_size_of(micro)
        keep = max(1, size - index * size // max(len(micros), 2))
        result.append(layout_of(micro).take(slice(0, keep)) if keep < size else micro)
    return result
