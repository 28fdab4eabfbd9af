"""Kill `wholebatch train` at random moments, resume it, and compare it with a run left alone.

    python scripts/kills.py [--kills 20] [--seed 1]

On one process, and on two ranks with FSDP2. The resumed runs must end with the same bits: weights,
optimizer state, random generators and metrics.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cli.helpers import NOISY, assert_same_bits, metrics_of, newest_checkpoint  # noqa: E402


def start(folder: Path, out: str, *, ranks: int) -> subprocess.Popen[bytes]:
    """Begin or continue the run in a process group of its own."""
    command = [sys.executable, "-m", "wholebatch.cli"]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc-per-node", str(ranks), "-m", "wholebatch.cli"]
    options = ["train", "mine.py", "--resume", "--out", out]
    options += ["--updates", "60", "--checkpoint-every", "4"]
    options += ["--parallel", "fsdp2"] if ranks > 1 else []
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *options],
        cwd=folder,
        # Slow enough that a moment inside a window can be hit.
        env={**environment, "GLOO_SOCKET_IFNAME": "lo", "SECONDS": "0.01"},
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


def is_same(one: Path, other: Path) -> bool:
    """Return True if the runs have the same checkpoint and the same metrics, but for times."""
    try:
        assert_same_bits(newest_checkpoint(one), newest_checkpoint(other))
        assert_same_bits(metrics_of(one), metrics_of(other))
    except AssertionError as difference:
        print(difference)
        return False
    return True


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
            (folder / "mine.py").write_text(NOISY, encoding="utf-8")
            assert start(folder, "straight", ranks=ranks).wait(timeout=300) == 0
            struck = run_with_kills(
                folder, "killed", ranks=ranks, kills=given.kills, seed=given.seed
            )
            equal = is_same(folder / "straight", folder / "killed")
            how = "one process" if ranks == 1 else f"{ranks} ranks, FSDP2"
            bits = "the same bits" if equal else "DIFFERENT BITS"
            print(f"{how}: {struck} of {given.kills} kills struck a running process, {bits}")
            right &= equal and struck > 0
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
