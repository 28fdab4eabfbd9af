"""Batches of images, and what an undivided step leaves in a model."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

torch.set_num_threads(1)
State = dict[str, Tensor]
Images = dict[str, Tensor]


def batch(size: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Images:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 6, 6, generator=generator, dtype=dtype)
    # Samples that differ much, so that a wrong mean cannot hide.
    x = x * torch.linspace(0.3, 2, size, dtype=dtype).view(-1, 1, 1, 1) + 1.5
    return {"x": x, "y": torch.randint(0, 5, (size,), generator=generator)}


def mean(model: nn.Module, micro: Images) -> Tensor:
    return F.cross_entropy(model(micro["x"]), micro["y"])


def result(model: nn.Module) -> tuple[State, State]:
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, {n: b.double() for n, b in model.named_buffers()}


def whole(model: nn.Module, data: Images) -> tuple[State, State]:
    model = copy.deepcopy(model)
    mean(model, data).backward()
    return result(model)


def error(got: State, want: State) -> float:
    assert got.keys() == want.keys()
    assert want
    gap = torch.cat([(got[n] - want[n]).double().flatten() for n in want])
    return float(gap.norm() / torch.cat([v.double().flatten() for v in want.values()]).norm())
