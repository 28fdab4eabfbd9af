"""The ready losses equal their definitions, however many rows are computed at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from wholebatch.errors import LossError, OptionError
from wholebatch.losses.contrastive import clip_loss
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import Loss


def views(samples: int = 11, features: int = 5) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(samples, features, dtype=torch.float64) for _ in range(2))
    return a.requires_grad_(), b.requires_grad_()


def gradients(total: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total, of))


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.allclose(g, w, rtol=1e-12, atol=1e-13) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
@pytest.mark.parametrize("symmetric", [True, False])
def test_clip(rows: int, symmetric: bool) -> None:
    a, b = views()
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    logits = scale * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    want = F.cross_entropy(logits, torch.arange(11), reduction="sum")
    if symmetric:
        want = (want + F.cross_entropy(logits.T, torch.arange(11), reduction="sum")) / 2
    loss = clip_loss(a, b, scale=scale, symmetric=symmetric, rows=rows)
    assert loss.units == 11
    assert torch.allclose(loss.total, want, rtol=1e-12)
    assert same(gradients(loss.total, a, b, scale), gradients(want, a, b, scale))


def test_rows_bound_what_is_saved() -> None:
    """No tensor of samples × samples is kept for the backward, or even made."""
    a, b = views(samples=64)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        clip_loss(a, b, rows=4)
    assert max(saved) <= 64 * 5


def test_refusals() -> None:
    a, b = views()
    with pytest.raises(LossError, match=r"shapes \(11, 5\) and \(4, 5\)"):
        clip_loss(a, b[:4])
    with pytest.raises(OptionError, match="rows=0"):
        clip_loss(a, b, rows=0)
    with pytest.raises(OptionError, match="encode"):
        Coupled(None, lambda all: Loss(all, 1))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="tolerance=-1"):
        Coupled(lambda m, x: x, lambda all: Loss(all, 1), tolerance=-1)
