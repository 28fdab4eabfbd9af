"""Small recipes, and what the tests of the command look at."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SRC = Path(__file__).parents[2] / "src"

# Dropout, and a sample that is drawn anew each time: everything that resuming could get wrong.
# STOP_AT=n sends the process a signal in its n-th loss, so that a stop is in a known micro-batch.
# SECONDS is how long a loss takes at least.
NOISY = """
import os, signal, time
import torch
from torch import nn
import wholebatch as wb

defaults = {"batch_size": 10, "micro_batch": 4, "updates": 6, "clip_norm": 0.5}
defaults["checkpoint_every"] = 2
audit = False  # a look would count as calls
calls = 0

class Points:
    def __len__(self):
        return 37
    def __getitem__(self, index):
        place = torch.Generator().manual_seed(index)
        x = torch.randn(5, generator=place) + 0.1 * torch.randn(5)
        return {"x": x, "y": torch.tensor(index % 3)}

def model():
    return nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))

def data():
    return Points()

def loss(model, micro):
    global calls
    calls += 1
    time.sleep(float(os.environ.get("SECONDS", "0")))
    if str(calls) == os.environ.get("STOP_AT"):
        for _ in range(int(os.environ.get("STOP_TIMES", "1"))):
            signal.raise_signal(getattr(signal, os.environ.get("STOP_BY", "SIGINT")))
    return wb.cross_entropy(model(micro["x"]), micro["y"])

def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
"""


# float64 and no randomness: the update must not depend on how the batch was split.
EXACT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import wholebatch as wb

defaults = {"batch_size": 10, "micro_batch": 4, "updates": 4}
unit = "points"

def model():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

def data():
    place = torch.Generator().manual_seed(3)
    x = torch.randn(24, 5, generator=place, dtype=torch.float64)
    return TensorDataset(x, torch.arange(24) % 3)

def loss(model, micro):
    x, y = micro
    return wb.cross_entropy(model(x), y)

def units(micro):
    return len(micro[1])
"""


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it wrote."""

    status: int
    out: str
    err: str


def environment_of(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **more}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without time and resources, in which equal runs differ."""
    timing = {"seconds", "units_per_second", "time", "memory", "undivided_memory", "recoveries"}
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if k not in timing} for record in records]


def newest_checkpoint(run: Path) -> dict[str, Any]:
    """The state of the newest checkpoint of a run."""
    import torch

    from wholebatch.cli.checkpoints import Checkpoints
    from wholebatch.cli.parallel_ranks import World

    loaded = Checkpoints(run / "checkpoints", World(0, device=torch.device("cpu"))).load()
    assert loaded is not None
    return loaded.state


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    """Equal in structure and in every bit of every tensor."""
    import torch

    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_bits(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same_bits(*pair, f"{where}[{index}]")
    else:
        assert one == other, where
