"""Kill `wholebatch train` at random moments, resume it, and compare it with a run left alone.

    python scripts/kills.py [--kills 20] [--seed 1]

On one process, and on two ranks. The resumed runs must end with the same bits: weights,
optimizer state, random generators and metrics.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cli.helpers import NOISY, assert_same_bits, metrics_of, newest_checkpoint  # noqa: E402
from tests.processes import ENVIRONMENT, Started  # noqa: E402


def start(folder: Path, out: str, *, ranks: int, updates: int) -> Started:
    """Begin or continue the run in a process group of its own."""
    options = ["train", "mine.py", "--resume", "--out", out]
    options += ["--updates", str(updates)]
    # Slow enough that a moment inside a window can be hit.
    environment = {**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", "SECONDS": "0.01"}
    return Started(
        "wholebatch.cli",
        options,
        folder=folder,
        cwd=folder,
        environment=environment,
        ranks=ranks if ranks > 1 else None,
    )


def windows_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def run_with_kills(
    folder: Path, out: str, *, ranks: int, updates: int, kills: int, seed: int
) -> int:
    """Return how many kills struck; then let the run end."""
    chance, struck = random.Random(seed), 0
    apart = max(1, updates // (2 * max(1, kills)))
    for number in range(kills):
        running = start(folder, out, ranks=ranks, updates=updates)
        wanted = windows_of(folder / out) + chance.randint(0, apart)
        until = time.monotonic() + 120
        if number % 5 == 4:  # while it starts, reads the checkpoint or joins
            time.sleep(chance.uniform(0.1, 3.0))
        else:
            while running.status is None and windows_of(folder / out) < wanted:
                assert time.monotonic() < until, (folder / "stderr").read_text()[-3000:]
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.05))
        struck += running.status is None
        running.kill()
    ended = start(folder, out, ranks=ranks, updates=updates).wait(timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return struck


def is_same(one: Path, other: Path) -> bool:
    """Return True if the runs have the same checkpoint and the same metrics, but for times."""
    try:
        assert_same_bits(newest_checkpoint(one), newest_checkpoint(other))
        assert_same_bits(metrics_of(one), metrics_of(other))
    except AssertionError as difference:
        print(difference)
        return False
    return True


def kill(folder: Path, *, ranks: int, kills: int, seed: int) -> bool:
    """Train once alone and once with kills; print what came of it, and return if it is right."""
    text = NOISY.replace('["checkpoint_every"] = 2', '["checkpoint_every"] = 4')
    (folder / "mine.py").write_text(text, encoding="utf-8")
    updates = 20 + 10 * kills  # else the run ends before the last of them
    alone = start(folder, "straight", ranks=ranks, updates=updates).wait(timeout=300)
    assert alone.returncode == 0, alone.stderr[-3000:]
    struck = run_with_kills(folder, "killed", ranks=ranks, updates=updates, kills=kills, seed=seed)
    equal = is_same(folder / "straight", folder / "killed")
    how = "one process" if ranks == 1 else f"{ranks} ranks, FSDP2"
    bits = "the same bits" if equal else "DIFFERENT BITS"
    print(f"{how}: {struck} of {kills} kills struck a running process, {bits}")
    return equal and struck > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, choices=(1, 2), action="append")
    given = parser.parse_args()
    right = True
    for ranks in given.ranks or (1, 2):
        with tempfile.TemporaryDirectory() as name:
            right &= kill(Path(name), ranks=ranks, kills=given.kills, seed=given.seed)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
