"""A trainer of sixty lines, right but for one bug, as public projects have had them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, LENGTH = 8, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9)
        self.kept: Tensor | None = None

    def forward(self, tokens: Tensor, *, keeps_cast: bool) -> Tensor:
        weight = self.hidden.weight * 1.0
        if keeps_cast:
            self.kept = weight = weight.detach() if self.kept is not None else weight
        hidden = functional.linear(self.embed(tokens), weight, self.hidden.bias)
        return self.head(torch.tanh(hidden))


def batch() -> tuple[Tensor, Tensor]:
    """Eight samples with one to six tokens that count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(9, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(9, (SAMPLES, LENGTH), generator=generator)
    counted = torch.tensor([1, 6, 2, 5, 3, 3, 1, 6])[:, None]
    return tokens, labels.masked_fill(torch.arange(LENGTH) >= counted, -100)


def train(micro_batch: int, *, bug: str = "", updates: int = 1) -> nn.Module:
    """Make updates from the batch, in micro-batches, on this rank's part of it."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(3)
    model = Model()
    adam = bug in ("adam", "right adam")
    optimizer: Any = torch.optim.AdamW if adam else partial(torch.optim.SGD, lr=0.5)
    optimizer = optimizer(model.parameters())
    tokens, labels = (each[rank::ranks] for each in batch())
    total = float((batch()[1] != -100).sum())
    micros = list(zip(tokens.split(micro_batch), labels.split(micro_batch), strict=True))
    for _ in range(updates):
        for index, (x, y) in enumerate(micros):
            model.hidden.bias.data += 0.01 * (bug == "moves weights")
            logits = model(x, keeps_cast=bug == "kept cast").flatten(0, 1)
            loss = functional.cross_entropy(logits, y.flatten(), reduction="sum")
            if bug in ("mean of means", "not divided"):
                loss = loss / (y != -100).sum() / (len(micros) if bug == "mean of means" else 1)
            elif bug == "ranks' means":
                loss = loss / (labels != -100).sum()
            else:
                loss = loss * ranks / total / (len(micros) if bug == "1/K" else 1)
            if bug == "only the last":
                optimizer.zero_grad()
            if bug in ("2^N", "2^N clipped"):
                scale(model, 2.0)
            loss.backward()
            if bug == "clipped each":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if bug == "last not reduced" and index == len(micros) - 2:
                reduce(model, ranks)
            if bug == "steps each":
                optimizer.step()
        if bug != "not reduced" and (bug != "last not reduced" or len(micros) == 1):
            reduce(model, ranks)
        if bug in ("K", "K clipped", "adam"):
            scale(model, float(len(micros)))
        if bug in ("2^N all", "summed"):
            scale(model, 2.0 ** len(micros) if bug == "2^N all" else float(ranks))
        if "clipped" in bug and bug != "clipped each":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if bug == "rate":
            optimizer.param_groups[0]["lr"] = 0.5 * len(micros)
        optimizer.step()
        optimizer.zero_grad()
    return model


def scale(model: nn.Module, factor: float) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= factor


def reduce(model: nn.Module, ranks: int) -> None:
    for p in model.parameters():
        if ranks > 1 and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= ranks
