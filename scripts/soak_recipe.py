"""A recipe whose every sum is exact, with faults drawn at random: what `scripts/soak.py` trains.

Inputs, weights and updates lie on coarse grids, so that float64 rounds nothing: the update is the
same bits in whatever micro-batches, and on however many ranks, it is made. Only then can a run that
ran out of memory half way through a window be compared bit for bit with one that did not.

`SOAK_FAULTS` names a file to which every fault is written before it happens; without it there are
none. `SOAK_DRAW` is what the faults of this attempt are drawn from.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.cli import checkpoints as checkpoint

BATCH, SAMPLES, INPUTS, WIDTH = 16, 64, 6, 8
GRID = 64.0
RANK = int(os.environ.get("RANK", "0"))
defaults = {"batch_size": BATCH, "micro_batch": 8, "steps": 100, "checkpoint_every": 20}

# One process begins such a window again; several ranks end, and are started again.
MEMORY = 1 / 200 if os.environ.get("WORLD_SIZE", "1") == "1" else 1 / 2000
# The chance of each fault, at a micro-batch of four samples. The last five end the process.
RATES = {
    "out of memory in a forward": MEMORY,
    "out of memory in a backward": MEMORY,
    "slow rank": 1 / 400,
    "out of memory in the step": 1 / 1000,
    "NaN": 1 / 1000,
    "full disk at a checkpoint": 1 / 1000,
    "SIGTERM": 1 / 1000,
    "SIGKILL": 1 / 1000,
}
_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
_draw = random.Random(f"{os.environ.get('SOAK_DRAW')} {_attempt} {RANK}")
_log = os.environ.get("SOAK_FAULTS")
_step_fails = False


def _happens(samples: int) -> str | None:
    """Return the fault of this micro-batch, if there is one; the global generators are left alone.

    One sample always fits in the memory: nothing smaller could be tried.
    """
    if _log is None:
        return None
    at = _draw.random()
    for name, chance in RATES.items():
        at -= chance * samples / 4  # as often in a window, however it is split
        if at < 0:
            if samples == 1 and name in (
                "out of memory in a forward",
                "out of memory in a backward",
            ):
                return None
            _note(name)
            return name
    return None


def _note(name: str) -> None:
    assert _log is not None
    file = os.open(_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{name}\n".encode())
    os.close(file)


class Points:
    """Whole numbers; half of each sample is drawn anew every time it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = torch.Generator().manual_seed(index)
        fixed = torch.randint(-2, 3, (INPUTS,), generator=place)
        drawn = torch.randint(-1, 2, (INPUTS,))
        return {"x": (fixed + drawn).double(), "y": torch.tensor([float(index % 5 - 2)]).double()}


class OnGrid(torch.optim.Optimizer):
    """SGD to the next point of the grid, up or down by a draw that only the update decides."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1 / 8})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        global _step_fails
        if _step_fails:
            _step_fails = False
            raise torch.OutOfMemoryError("injected in the step")
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    count = state["step"] = state.get("step", 0) + 1
                    draw = torch.Generator().manual_seed(count)
                    up = torch.rand(parameter.shape, generator=draw, dtype=torch.float64)
                    moved = (parameter - group["lr"] * parameter.grad) * GRID
                    parameter.copy_(torch.floor(moved + up).div(GRID).clamp(-1, 1))


class Net(nn.Module):
    """Two layers without a nonlinearity that rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(INPUTS, WIDTH).double()
        self.down = nn.Linear(WIDTH, 1).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.round(parameter * GRID) / GRID)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def model() -> nn.Module:
    return Net()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return OnGrid(model.parameters())


def data() -> Points:
    return Points()


def units(micro: dict[str, Tensor]) -> int:
    return len(micro["y"])


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    """The squared error, and now and then a fault."""
    fault = _happens(len(micro["y"]))
    if fault == "out of memory in a forward":
        raise torch.OutOfMemoryError("injected in a forward")
    total = (model(micro["x"]) - micro["y"]).square().sum()
    if fault is not None:
        total = _break(fault, total)
    return wb.Loss(total, len(micro["y"]))


def _break(fault: str, total: Tensor) -> Tensor:
    global _step_fails
    if fault == "out of memory in a backward":
        total.register_hook(_out_of_memory)
    elif fault == "out of memory in the step":
        _step_fails = True
    elif fault == "slow rank":
        time.sleep(0.05)
    elif fault == "NaN":
        return total * float("nan")
    elif fault == "full disk at a checkpoint":
        checkpoint.to_disk = _full  # type: ignore[assignment, attr-defined]
    elif fault == "SIGTERM":
        signal.raise_signal(signal.SIGTERM)
    elif fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    return total


def _out_of_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError("injected in a backward")


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
