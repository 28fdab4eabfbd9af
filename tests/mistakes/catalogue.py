"""The catalogue of mistakes: what each spoils, where, and what must be said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.mistakes.task import Batch, Task, features

# Interfaces that see or own the forward can hold a micro-batch against its halves.
LOOKING = ("WholeBatch", "Lightning", "Trainer")
STREAMS = ("Accumulator", "Accumulator, counted", "Accelerate", "Fabric")
EVERYWHERE = (*LOOKING, *STREAMS)

COUPLES = r"coupl|compar|depends? on .*(others|samples)|other samples"
MOVES = r"state|buffer|moves|changes .*forward|forward .*(changes|moves)|counter"
SUMS = r"add up|adds up|\bsum\b|coupl|regularis"
IS_MEAN = r"\bmean\b"
TOUCHED = r"window|gradient|between"


@dataclass(frozen=True)
class Mistake:
    name: str
    plant: Callable[[Task], Task]
    words: str  # what an error or warning must contain
    interfaces: tuple[str, ...] = LOOKING
    listed: bool = False  # in the issue's own table
    only: frozenset[str] | None = None  # the kinds of models that it fits; None: all
    never: frozenset[str] = frozenset()
    windows: int = 1
    samples: int | None = None  # of a micro-batch of WholeBatch; None: drawn
    moves: bool = False  # the user's own line changes parameters, whatever the library does


MISTAKES: list[Mistake] = []
MASKED = frozenset({"transformer", "checkpointed", "lstm", "packed gru", "tied language model"})
CLASSIFIERS = frozenset({"mlp", "cnn with groupnorm", "lora on a frozen base", "custom function"})


def mistake(words: str, **more: Any) -> Callable[[Callable[[Task], Task]], Callable[[Task], Task]]:
    """Put a function into the catalogue; its name is the mistake's."""

    def keep(plant: Callable[[Task], Task]) -> Callable[[Task], Task]:
        name = plant.__name__.replace("_", " ")
        MISTAKES.append(Mistake(name, plant, words, **more))
        return plant

    return keep


def samples_of(task: Task, model: nn.Module, micro: Batch) -> tuple[Tensor, Tensor]:
    """Features and the loss of each sample."""
    out = task.forward(model, micro)
    losses = task.losses(out, micro) * task.weights(micro)
    return features(out), losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def similarity(z: Tensor, losses: Tensor) -> Tensor:
    z = F.normalize(torch.cat([z, losses[:, None]], 1), dim=1)
    return z @ z.T * 3.0
