"""The ready losses equal their definitions, however many rows are computed at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from wholebatch.errors import LossError, OptionError
from wholebatch.losses.contrastive import clip_loss, siglip_loss, supcon_loss
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


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
def test_siglip(rows: int) -> None:
    a, b = views()
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    logits = scale * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T + bias
    signs = 2 * torch.eye(11, dtype=torch.float64) - 1
    want = -F.logsigmoid(signs * logits).sum()
    loss = siglip_loss(a, b, scale=scale, bias=bias, rows=rows)
    assert loss.units == 11
    assert torch.allclose(loss.total, want, rtol=1e-12)
    assert same(gradients(loss.total, a, b, scale, bias), gradients(want, a, b, scale, bias))


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
def test_supervised(rows: int) -> None:
    z, _ = views()
    labels = torch.tensor([0, 1, 0, 2, 1, 0, 3, 1, 2, 0, 4])  # 3 and 4 are alone
    want = torch.zeros((), dtype=torch.float64)
    n = F.normalize(z, dim=-1)
    counted = 0
    for i in range(11):
        others = [j for j in range(11) if j != i]
        mates = [j for j in others if labels[j] == labels[i]]
        if mates:
            counted += 1
            log_sum = torch.stack([n[i] @ n[j] / 0.1 for j in others]).logsumexp(0)
            want = want - torch.stack([n[i] @ n[j] / 0.1 - log_sum for j in mates]).mean()
    loss = supcon_loss(z, labels, temperature=0.1, rows=rows)
    assert int(loss.units) == counted == 9
    assert torch.allclose(loss.total, want, rtol=1e-12)
    assert same(gradients(loss.total, z), gradients(want, z))


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
        siglip_loss(a, b, rows=0)
    with pytest.raises(LossError, match=r"labels of shape \(3,\) for 11 samples"):
        supcon_loss(a, torch.zeros(3))
    with pytest.raises(OptionError, match="encode"):
        Coupled(None, lambda all: Loss(all, 1))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="tolerance=-1"):
        Coupled(lambda m, x: x, lambda all: Loss(all, 1), tolerance=-1)
