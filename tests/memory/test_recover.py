"""Out of memory anywhere in a window ends in the numbers of the split that went through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.memory.models import mlp, vectors


def test_one_sample_that_does_not_fit_says_what_would_help() -> None:
    model = mlp()

    def fails(model: nn.Module, micro: Any) -> wb.Loss:
        raise torch.OutOfMemoryError("full at 3 bytes")

    options: Any = {"loss": fails, "micro_batch": 1, "audit": False}
    train = wb.WholeBatch(model, torch.optim.SGD(model.parameters()), **options)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"of one sample does not fit .*full at 3 bytes.*bf16"
    ):
        train.step(vectors(2))
