"""SIGKILLs all over a run under torchrun: nothing is lost, and the result has the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.cli.helpers import NOISY, assert_same_bits, metrics_of
from tests.distributed.launch import ROOT
from wholebatch.cli.checkpoints import Checkpoints, put_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = 2
T = TypeVar("T")
# Slow enough that a moment inside a window can be hit.
SLOW = NOISY.replace("    global calls", "    global calls\n    import time; time.sleep(0.01)")


@contextmanager
def job(folder: Path, out: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`wholebatch train` under torchrun, with restarts; ended in any case."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "--max-restarts", "20", "-m", "wholebatch.cli"]
    command += ["train", "slow.py", "--out", out, *options]
    with (folder / f"{out}.log").open("wb") as log:
        running = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield running
    finally:
        for worker in workers_of(running.pid):
            kill(worker)
        running.kill()
        running.wait()


def workers_of(launcher: int) -> list[int]:
    """The processes that torchrun has started, by /proc."""
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except OSError:
        return []
    return [child for child in map(int, children) if is_worker(child)]


def is_worker(process: int) -> bool:
    try:
        return b"wholebatch.cli" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def windows_in(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for(running: subprocess.Popen[bytes], log: Path, ready: Callable[[], T]) -> T:
    """What `ready` gives as soon as it is true. One reading: a second one may see less, because
    the list of children in /proc leaves some out while others of them end."""
    deadline = time.monotonic() + 240
    while not (found := ready()):
        assert running.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.002)
    return found


def all_but(before: set[int], launcher: int) -> list[int]:
    """The workers that are not among `before`, once every rank has one; none until then."""
    workers = sorted(set(workers_of(launcher)) - before)
    return workers if len(workers) == RANKS else []


@pytest.mark.parametrize(("parallel", "kills", "steps"), [("ddp", 10, 60), ("fsdp2", 3, 21)])
def test_kills_lose_nothing(tmp_path: Path, parallel: str, kills: int, steps: int) -> None:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("finds the workers by /proc")
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    options = ("--parallel", parallel, "--steps", str(steps), "--checkpoint-every", "3")
    with job(tmp_path, "straight", *options) as running:
        assert running.wait(timeout=300) == 0, (tmp_path / "straight.log").read_text()[-4000:]

    chance = random.Random(1)
    metrics, log = tmp_path / "killed/metrics.jsonl", tmp_path / "killed.log"
    struck: list[int] = []
    victims: set[int] = set()
    with job(tmp_path, "killed", *options) as running:
        before: set[int] = set()
        for number in range(kills):
            # A fresh set of workers: none of those that the last kill ended.
            workers = wait_for(running, log, lambda: all_but(before, running.pid))  # noqa: B023
            before |= set(workers)
            if number % 5 == 0:  # while it starts: it imports, joins, or reads the checkpoint
                time.sleep(chance.uniform(0.0, 3.0))
            else:  # at a random moment of a random window; all over the run
                windows = 5 * number + chance.randint(0, 4)
                wait_for(running, log, lambda: windows_in(metrics) >= windows)  # noqa: B023
                time.sleep(chance.uniform(0.0, 0.04))
                struck.append(windows_in(metrics))
            victim = chance.randrange(RANKS)
            victims.add(victim)
            kill(workers[victim])
        assert running.wait(timeout=300) == 0, log.read_text()[-4000:]

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert len(victims) > 1, "only one rank was ever killed"
    assert any(windows % 3 for windows in struck), "every kill was right after a checkpoint"
    assert "  resumed  after update" in log.read_text()
    assert [line["update"] for line in metrics_of(killed)] == list(range(1, steps + 1))
    assert metrics_of(killed) == metrics_of(straight)
    first, second = state_of(straight), state_of(killed)
    for part in ("model", "optimizer", "data", "ranks"):
        assert_same_bits(first[part], second[part], part)


def state_of(run: Path) -> dict[str, Any]:
    found = Checkpoints(run / "checkpoints").load()
    state: dict[str, Any] = put_together(found.state, found.path, like=lambda _: None)
    return state
