"""A batch, its micro-batches, and what a window of them leaves in a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wholebatch.coupled.batchnorm.lock_step import LockStep

torch.set_num_threads(1)
State = dict[str, Tensor]


def batch(size: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 6, 6, generator=generator, dtype=dtype)
    # Samples that differ much, so that a wrong mean cannot hide.
    x = x * torch.linspace(0.3, 2, size, dtype=dtype).view(-1, 1, 1, 1) + 1.5
    return x, torch.randint(0, 5, (size,), generator=generator)


def total(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(micro[0]), micro[1], reduction="sum")


def result(model: nn.Module) -> tuple[State, State]:
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, {n: b for n, b in model.named_buffers() if b.is_floating_point()}


def whole(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[State, State]:
    model = copy.deepcopy(model)
    total(model, data).backward()
    return result(model)


def split(data: tuple[Tensor, Tensor], sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data[0].split(list(sizes)), data[1].split(list(sizes)), strict=True))


def lockstep(model: nn.Module, micros: Sequence[Any], *, loss: Any = total) -> tuple[State, State]:
    LockStep(model).run(
        micros, forward=lambda micro: loss(model, micro), backward=lambda value: value.backward()
    )
    return result(model)


def error(got: State, want: State) -> float:
    assert got.keys() == want.keys()
    assert want
    gap = torch.cat([(got[n] - want[n]).double().flatten() for n in want])
    return float(gap.norm() / torch.cat([v.double().flatten() for v in want.values()]).norm())


class Dropped(nn.Module):
    """Dropout inside blocks that may be checkpointed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)
            )
            for _ in range(3)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(144, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.how == "kept":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)
