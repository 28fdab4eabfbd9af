"""A wide network on a table of numbers: many parameters, little arithmetic for each sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import wholebatch as wb

defaults = {"batch_size": 256, "micro_batch": 32, "steps": 50, "clip_norm": 1.0}
unit = "rows"


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 16)
    )


def data() -> TensorDataset:
    place = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 256, generator=place)
    return TensorDataset(x, (x[:, :16] + 0.5 * x[:, 16:32]).argmax(dim=1))


def loss(model: nn.Module, micro: Any) -> wb.Loss:
    x, y = micro
    return wb.cross_entropy(model(x), y)


def units(micro: list[Tensor]) -> int:
    return len(micro[1])
