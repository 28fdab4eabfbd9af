"""The problem that the torch libraries are compared on: a small model over tokens, in float64.

Windows have 4 micro-batches of 4 samples. Every sample is 8 tokens; where tokens are masked, it
counts between 1 and 7 of them. Samples are taken in order, so every library sees the same windows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from compare.row import Row

__all__ = [
    "PROBLEMS",
    "Mode",
    "Problem",
    "Reader",
    "Tokens",
    "counted",
    "distance",
    "loss_of",
    "rows_of",
]

ROOT = Path(__file__).resolve().parents[2]
IGNORE = -100
WORDS, LENGTH = 32, 8
LEARNING_RATE = 0.5

Mode = Literal["whole", "own", "ours"]
"""Undivided batches; the library's own accumulation; wholebatch in the library."""


@dataclass(frozen=True)
class Problem:
    """One epoch of one case."""

    samples: int
    masked: bool = False
    clip_norm: float | None = None
    micro_batch: int = 4
    steps: int = 4
    ranks: int = 1

    def batches(self, mode: Mode) -> tuple[int, int]:
        """Samples of a batch on each rank, and how many make a window."""
        if mode == "whole":  # one process has the whole global batch
            return self.micro_batch * self.steps * self.ranks, 1
        return self.micro_batch, self.steps


PROBLEMS = {
    "equal": Problem(32),
    "uneven": Problem(29),
    "short tail": Problem(40),
    "masked tokens": Problem(32, masked=True),
    "clipped": Problem(32, masked=True, clip_norm=0.05),
    "two processes": Problem(64, masked=True, ranks=2),
}


class Tokens(Dataset[dict[str, Tensor]]):
    """Samples of `input_ids` and `labels`; label t belongs to token t, nothing is shifted."""

    def __init__(self, problem: Problem) -> None:
        draw = torch.Generator().manual_seed(3)
        size = (problem.samples, LENGTH)
        self.tokens = torch.randint(0, WORDS, size, generator=draw)
        self.labels = torch.randint(0, WORDS, size, generator=draw)
        if problem.masked:
            lengths = torch.randint(1, LENGTH, (problem.samples, 1), generator=draw)
            # Samples of one window's first micro-batches are short, so that means of means differ.
            lengths[: problem.samples // 2] = (lengths[: problem.samples // 2] + 2) // 3
            self.labels[torch.arange(LENGTH) >= lengths] = IGNORE

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Reader(nn.Module):
    """Logits of every token from it and the one before."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(WORDS, 16)
        self.mix = nn.Linear(32, 24)
        self.read = nn.Linear(24, WORDS)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        here = self.embed(tokens)
        before = functional.pad(here, (0, 0, 1, 0))[:, :-1]
        logits: Tensor = self.read(torch.tanh(self.mix(torch.cat([here, before], -1))))
        return logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the tokens that count, as nearly every script has it."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def counted(labels: Tensor) -> Tensor:
    return (labels != IGNORE).sum()


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double().clone()


def distance(trained: Tensor, reference: Tensor, start: Tensor) -> float:
    """Relative L2 distance of what training added to the parameters."""
    return float((trained - reference).norm() / (reference - start).norm())


Train = Callable[[Problem, Mode], Tensor]
"""Trains one epoch, and gives the parameters back as one vector."""


def rows_of(
    trainer: str,
    version: str,
    train: Train,
    start: Tensor,
    *,
    precision: str = "float64",
    cases: Sequence[str] = tuple(PROBLEMS),
    with_ours: bool = True,
) -> list[Row]:
    """Return the rows of a trainer: every case, by its own accumulation and with wholebatch."""
    rows = []
    for name in cases:
        problem = PROBLEMS[name]
        reference = train(problem, "whole")
        run = partial(train, problem) if problem.ranks == 1 else partial(in_two_processes, train)
        own = distance(run("own"), reference, start)
        ours = distance(run("ours"), reference, start) if with_ours else None
        rows.append(Row(trainer, version, name, own, ours, precision))
    return rows


def in_two_processes(train: Train, mode: Mode) -> Tensor:
    """Train in two processes on this machine, and return what the first of them has."""
    worker = ROOT / "benchmarks" / "split_dependence.py"
    start = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.pt"
        function = (train.__module__, train.__name__, mode, str(result))
        command = [sys.executable, "-m", *start, str(worker), "--as-rank", *function]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "benchmarks"))),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        if done.returncode or not result.exists():
            raise RuntimeError(f"{json.dumps(command)}\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
        trained: Tensor = torch.load(result)
        return trained
