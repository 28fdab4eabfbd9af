"""The kinds of models that mistakes are planted in, and what their tasks share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.mistakes.task import Batch, Task

Make = Callable[[random.Random, int], Task]
KINDS: dict[str, Make] = {}
RANDOM = {"transformer with dropout", "checkpointed dropout"}
WITH_BATCHNORM = {"cnn with batchnorm", "mlp with batchnorm"}


def kind(name: str) -> Callable[[Make], Make]:
    def keep(make: Make) -> Make:
        KINDS[name] = make
        return make

    return keep


def task(name: str, seed: int, samples: int | None = None) -> Task:
    """The same model, batch and loss for the same name and seed."""
    torch.manual_seed(seed)
    draw = random.Random(f"{name} {seed}")
    made = KINDS[name](draw, draw.randint(13, 21) if samples is None else samples)
    return made.but(name=name)


def run(model: nn.Module, micro: Batch) -> Any:
    return model(micro["x"])


def classify(out: Tensor, micro: Batch) -> Tensor:
    return F.cross_entropy(out, micro["y"], reduction="none")


def squared(out: Tensor, micro: Batch) -> Tensor:
    return (out - micro["y"]).square().flatten(1).sum(1)


def tokens(out: Tensor, micro: Batch) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), micro["y"], reduction="none")


def mask(micro: Batch) -> Tensor:
    return micro["mask"].double()


def weight(micro: Batch) -> Tensor:
    return micro["weight"]


def rows(number: int, width: int) -> Tensor:
    return torch.randn(number, width, dtype=torch.float64)


def labelled(x: Tensor, classes: int, **more: Tensor) -> Batch:
    return {"x": x, "y": torch.randint(0, classes, (len(x),)), **more}


def lengths(samples: int, longest: int) -> tuple[Tensor, Tensor]:
    """Numbers of tokens, at least 2, and the mask of them."""
    count = torch.randint(2, longest + 1, (samples,))
    count[0] = longest
    return count, torch.arange(longest)[None] < count[:, None]


def classifier(model: nn.Module, x: Tensor, classes: int) -> Task:
    return Task("", model.double(), labelled(x, classes), run, classify)
