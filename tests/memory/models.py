"""Small models of the usual kinds, with a loss and a batch maker each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from wholebatch.losses.loss import Loss, cross_entropy


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = (
            part.view(n, t, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self,
        *,
        layers: int = 2,
        width: int = 32,
        heads: int = 4,
        vocabulary: int = 96,
        length: int = 24,
        dropout: float = 0.0,
        checkpointed: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def loss(model: nn.Module, micro: dict[str, Tensor]) -> Loss:
    return cross_entropy(model(micro["x"]), micro["y"])


def vectors(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 20), "y": torch.randint(0, 5, (n,))}


def images(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 16, 16), "y": torch.randint(0, 5, (n,))}


def tokens(n: int, length: int = 24) -> dict[str, Tensor]:
    return {"x": torch.randint(0, 96, (n, length)), "y": torch.randint(0, 96, (n, length))}


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]


CASES = {
    "mlp": Case(mlp, vectors),
    "gpt": Case(GPT, tokens),
    "gpt-tied": Case(lambda: GPT(tied=True), tokens),
    "gpt-dropout": Case(lambda: GPT(dropout=0.1), tokens),
    "gpt-checkpointed": Case(lambda: GPT(checkpointed=True), tokens),
    "gpt-checkpointed-dropout": Case(lambda: GPT(checkpointed=True, dropout=0.1), tokens),
    "cnn": Case(cnn, images),
}
