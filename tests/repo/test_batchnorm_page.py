"""The function of docs/batchnorm.md that replaces BatchNorm: exact with both norms it names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.repo.test_docs import ROOT, python_blocks
from tests.support import distance

BLOCKS = python_blocks(ROOT / "docs/batchnorm.md")


@pytest.mark.parametrize("norm", ["group_norm", "layer_norm"])
def test_a_replaced_batchnorm_needs_no_batch(norm: str) -> None:
    [block] = [code for code in BLOCKS if "def replace_batchnorm" in code]
    torch.manual_seed(0)
    block_of = lambda: nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))  # noqa: E731
    model = nn.Sequential(nn.Conv2d(1, 6, 3), block_of(), nn.ReLU(), block_of()).double()
    names: dict[str, Any] = {"torch": torch, "model": copy.deepcopy(model)}
    exec(block, names)
    names["replace_batchnorm"](model, names[norm])
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    model.double()

    def total(model: nn.Module, images: Tensor) -> Tensor:
        result: Tensor = model(images).square().flatten(1).mean(1).sum()
        return result

    batch = torch.randn(7, 1, 8, 8, dtype=torch.float64)
    right = torch.autograd.grad(total(model, batch) / len(batch), list(model.parameters()))
    train = wb.WholeBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=lambda model, images: wb.Loss(total(model, images), len(images)),
        micro_batch=3,
    )
    before = [p.detach().clone() for p in model.parameters()]
    assert train.step(batch).micro_batches == 3
    moved = [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]
    assert distance(moved, right) < 1e-12
