"""A small CNN with BatchNorm on scikit-learn's 1,797 handwritten digits.

BatchNorm normalises by the batch, so plain accumulation trains a different model. Here the batch is
not split: where it does not fit, the activations of the blocks are computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import wholebatch as wb
from wholebatch.errors import MissingExtraError

defaults = {
    "batch_size": 256,
    "updates": 80,
    "precision": "full",
    "clip_norm": 1.0,
    "lr": 5e-3,
    "checkpoint_every": 20,
}
unit = "images"


def model() -> nn.Module:
    def block(channels_in: int, channels_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )

    return nn.Sequential(
        block(1, 32),
        block(32, 64),
        nn.MaxPool2d(2),
        block(64, 64),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 64, 10),
    )


def data() -> TensorDataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("scikit-learn", "recipes", "the recipe digits-cnn") from None
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.as_tensor(digits.target, dtype=torch.long))


def loss(model: nn.Module, micro: Any) -> wb.Loss:
    images, labels = micro
    return wb.cross_entropy(model(images), labels)


def units(micro: list[Tensor]) -> int:
    return len(micro[1])
