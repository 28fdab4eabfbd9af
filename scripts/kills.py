"""Kill `wholebatch train` at random moments, resume it, and compare it with a run left alone.

    python scripts/kills.py [--kills 20] [--seed 1]

On one process, and on two ranks with FSDP2. The resumed runs must end with the same bits: weights,
optimizer state, random generators and metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RECIPE = """
import time
import torch
from torch import nn
import wholebatch as wb

defaults = {"batch_size": 10, "micro_batch": 4, "updates": 60, "checkpoint_every": 4}
audit = False

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
    time.sleep(0.01)  # slow enough that a moment inside a window can be hit
    return wb.cross_entropy(model(micro["x"]), micro["y"])

def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
"""


def start(folder: Path, out: str, *, ranks: int) -> subprocess.Popen[bytes]:
    """Begin or continue the run in a process group of its own."""
    command = [sys.executable, "-m", "wholebatch.cli"]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc-per-node", str(ranks), "-m", "wholebatch.cli"]
    options = ["train", "mine.py", "--resume", "--out", out]
    options += ["--parallel", "fsdp2"] if ranks > 1 else []
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *options],
        cwd=folder,
        env={**environment, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=(folder / f"{out}.out").open("ab"),
        stderr=(folder / f"{out}.err").open("ab"),
        start_new_session=True,
    )


def windows_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def run_with_kills(folder: Path, out: str, *, ranks: int, kills: int, seed: int) -> int:
    """Return how many kills struck; then let the run end."""
    chance, struck = random.Random(seed), 0
    for number in range(kills):
        running = start(folder, out, ranks=ranks)
        wanted = windows_of(folder / out) + chance.randint(0, max(1, 100 // max(1, kills)))
        until = time.monotonic() + 120
        if number % 5 == 4:  # while it starts, reads the checkpoint or joins
            time.sleep(chance.uniform(0.5, 6.0))
        else:
            while running.poll() is None and windows_of(folder / out) < wanted:
                assert time.monotonic() < until, (folder / f"{out}.err").read_text()[-3000:]
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, 0.05))
        struck += running.poll() is None
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    status = start(folder, out, ranks=ranks).wait(timeout=300)
    assert status == 0, (folder / f"{out}.err").read_text()[-3000:]
    return struck


def state_of(run: Path) -> dict[str, Any]:
    """Return the last checkpoint with its shards, and the metrics but for times."""
    from wholebatch.cli.checkpoints import Checkpoints, fill_shards
    from wholebatch.cli.metrics import TIMING
    from wholebatch.cli.parallel_ranks import World

    loaded = Checkpoints(run / "checkpoints", World(0, device=torch.device("cpu"))).load()
    assert loaded is not None
    assert not loaded.damaged
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    metrics = [{k: v for k, v in line.items() if k not in TIMING} for line in lines]
    return {**fill_shards(loaded.state, loaded.path, lambda place: None), "metrics": metrics}


def same(one: Any, other: Any) -> bool:
    """True if both have the same structure and the same bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, choices=(1, 2), action="append")
    given = parser.parse_args()
    right = True
    for ranks in given.ranks or (1, 2):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "mine.py").write_text(RECIPE, encoding="utf-8")
            assert start(folder, "straight", ranks=ranks).wait(timeout=300) == 0
            struck = run_with_kills(
                folder, "killed", ranks=ranks, kills=given.kills, seed=given.seed
            )
            is_same = same(state_of(folder / "straight"), state_of(folder / "killed"))
            how = "one process" if ranks == 1 else f"{ranks} ranks, FSDP2"
            bits = "the same bits" if is_same else "DIFFERENT BITS"
            print(f"{how}: {struck} of {given.kills} kills struck a running process, {bits}")
            right &= is_same and struck > 0
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
