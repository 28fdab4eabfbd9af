"""Correct training of many kinds, which must be exact and raise no alarm."""

from __future__ import annotations

import random

import torch

from tests.mistakes import correct_losses, correct_models, models, sequences
from tests.mistakes.cases import CASES, STREAMS
from tests.mistakes.kinds import KINDS, WITH_BATCHNORM
from tests.mistakes.kinds import task as of_kind
from tests.mistakes.task import Task

SOURCES = (models, sequences, correct_losses, correct_models)  # importing them fills the lists


def task(name: str, seed: int) -> Task:
    if name in KINDS:
        return of_kind(name, seed)
    torch.manual_seed(seed)
    draw = random.Random(f"{name} {seed}")
    return CASES[name][0](draw, draw.randint(13, 21)).but(name=name)


def combinations() -> list[tuple[str, str]]:
    """Every correct case with every interface that it fits."""
    made = [
        (name, interface) for name, (_, interfaces) in CASES.items() for interface in interfaces
    ]
    for number, name in enumerate(KINDS):
        streams = () if name in WITH_BATCHNORM else STREAMS[number % 2 :: 2]
        made += [(name, interface) for interface in ("WholeBatch", *streams)]
        if number % 3 == 0 and streams:
            made.append((name, "Trainer"))
    return made
