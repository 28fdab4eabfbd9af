"""A byte-level GPT on the sources of the Python that runs it.

The corpus is on every machine: the standard library's `.py` files. Copy this file to start your
own recipe: `wholebatch recipes bytes-gpt > mine.py`, then `wholebatch train mine.py`.
"""

from __future__ import annotations

import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import wholebatch as wb

defaults = {
    "batch_size": 64,
    "micro_batch": 8,
    "updates": 100,
    "precision": "full",
    "clip_norm": 1.0,
    "checkpoint_every": 25,
}
unit = "bytes"

CONTEXT = 64
WIDTH = 128
LAYERS = 3
HEADS = 4
CORPUS_BYTES = 8_000_000


class Linear(nn.Linear):
    """A linear layer; `std` is the standard deviation of its first weights."""

    def __init__(self, inputs: int, outputs: int, *, std: float, bias: bool = False) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with smaller first values than torch's."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)


class Block(nn.Module):
    """Attention, then a multilayer perceptron, each with a LayerNorm before and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = Linear(WIDTH, 3 * WIDTH, std=WIDTH**-0.5)
        # Every branch adds to the residual stream: start with small additions.
        self.mix = Linear(WIDTH, WIDTH, std=0.02 / math.sqrt(2 * LAYERS))
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = Linear(WIDTH, 4 * WIDTH, std=WIDTH**-0.5, bias=True)
        self.down = Linear(4 * WIDTH, WIDTH, std=0.02 / math.sqrt(2 * LAYERS), bias=True)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        added: Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + added


class GPT(nn.Module):
    """A next-byte predictor: embeddings, blocks, and a head over the 256 byte values."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = Embedding(256, WIDTH)
        self.place = Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Linear(WIDTH, 256, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.byte(tokens) + self.place(places))))
        return logits


class Corpus:
    """Sequences of CONTEXT bytes, with the next byte of each position as the target."""

    def __init__(self, text: bytearray) -> None:
        self._text = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return max(0, len(self._text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self._text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return {"tokens": piece[:-1], "next": piece[1:]}


def model() -> nn.Module:
    return GPT()


def data() -> Corpus:
    """Return the standard library's sources, file by file in name order, up to CORPUS_BYTES."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    text = bytearray()
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - left_out)  # In place: os.walk then skips the others.
        for name in sorted(files):
            if name.endswith(".py") and len(text) < CORPUS_BYTES:
                text += Path(folder, name).read_bytes() + b"\n"
    return Corpus(text[:CORPUS_BYTES])


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["tokens"]), micro["next"], dim=-1)


def units(micro: dict[str, Tensor]) -> int:
    return micro["next"].numel()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95), fused=True)


def scheduler(optimizer: torch.optim.Optimizer, updates: int) -> Any:
    """Warm up over ten updates, then decay by a cosine to a tenth."""

    def factor(update: int) -> float:
        if update < 10:
            return (update + 1) / 10
        done = min(1.0, (update - 10) / max(1, updates - 10))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
