"""Attention with dropout in a prediction for CUDA that is made without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from wholebatch.losses.loss import Loss
from wholebatch.memory import predict_peak

SAMPLES, LENGTH, WIDTH, HEADS = 4, 128, 32, 4
MATRIX = SAMPLES * HEADS * LENGTH * LENGTH * 4

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's own kernels are asked")


class Attention(nn.Module):
    def __init__(self, dropout: float, *, positional: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.dropout, self.positional, self.masked = dropout, positional, masked
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mask = torch.ones(n, 1, t, t, dtype=torch.bool) if self.masked else None
        p = self.dropout if self.training else 0.0
        attend = functional.scaled_dot_product_attention
        y = attend(q, k, v, mask, p) if self.positional else attend(q, k, v, mask, dropout_p=p)
        return y.transpose(1, 2).reshape(n, t, width)


def loss(model: nn.Module, micro: Any) -> Loss:
    return Loss(model(micro["x"]).square().sum(), len(micro["x"]))


def peak(model: nn.Module, device: str = "cuda") -> int:
    batch = {"x": torch.randn(SAMPLES, LENGTH, WIDTH)}
    return predict_peak(model, loss, batch, device=device).peak


@without_cuda
@pytest.mark.parametrize("options", [{}, {"positional": True}, {"masked": True}])
def test_dropout_in_attention_keeps_no_matrix(options: dict[str, bool]) -> None:
    with_it, without = (
        peak(nn.Sequential(*(Attention(p, **options) for _ in range(3)))) for p in (0.1, 0.0)
    )
    assert with_it == without


@without_cuda
def test_matrices_are_counted_on_a_cpu() -> None:
    assert peak(Attention(0.1), "cpu") - peak(Attention(0.0), "cpu") > MATRIX
    assert functional.scaled_dot_product_attention.__module__ != "wholebatch.memory.fake_tensors"
