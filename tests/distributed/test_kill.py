"""SIGKILLs all over a run under torchrun: nothing is lost, and the result has the same bits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import processes
from tests.cli.helpers import NOISY, assert_same_bits, metrics_of
from wholebatch.cli.checkpoints import Checkpoints, put_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = 2
T = TypeVar("T")
# Slow enough that a moment inside a window can be hit.
SLOW = NOISY.replace("    global calls", "    global calls\n    import time; time.sleep(0.01)")


@contextmanager
def job(folder: Path, out: str, *options: str) -> Iterator[processes.Started]:
    """`wholebatch train` under torchrun, with restarts; ended in any case."""
    (folder / f"{out}.log").mkdir()
    running = processes.Started(
        "wholebatch.cli",
        ["train", "slow.py", "--out", out, *options],
        folder=folder / f"{out}.log",
        cwd=folder,
        environment={**os.environ, **processes.ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
        ranks=RANKS,
        restarts=20,
    )
    try:
        yield running
    finally:
        running.kill()


def workers_of(launcher: int) -> list[int]:
    """The ranks that run: the children of torchrun's process, by /proc."""
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except OSError:
        return []
    return [child for child in map(int, children) if is_alive(child)]


def is_alive(process: int) -> bool:
    try:  # one that has ended has no command line left
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except OSError:
        return False


def kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def windows_in(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for(running: processes.Started, ready: Callable[[], T]) -> T:
    """What `ready` gives as soon as it is true. One reading: a second one may see less, because
    the list of children in /proc leaves some out while others of them end."""
    deadline = time.monotonic() + 240
    while not (found := ready()):
        assert running.status is None, running.wait(timeout=0).stderr[-4000:]
        assert time.monotonic() < deadline, "240 s"
        time.sleep(0.005)
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
        done = running.wait(timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]

    chance = random.Random(1)
    metrics = tmp_path / "killed/metrics.jsonl"
    struck: list[int] = []
    victims: set[int] = set()
    with job(tmp_path, "killed", *options) as running:
        before: set[int] = set()
        for number in range(kills):
            # A fresh set of workers: none of those that the last kill ended.
            workers = wait_for(running, lambda: all_but(before, running.pid))  # noqa: B023
            before |= set(workers)
            if number % 5 == 0:  # while it starts: it joins, or reads the checkpoint
                time.sleep(chance.uniform(0.0, 1.0))
            else:  # at a random moment of a random window; all over the run
                windows = 5 * number + chance.randint(0, 4)
                wait_for(running, lambda: windows_in(metrics) >= windows)  # noqa: B023
                time.sleep(chance.uniform(0.0, 0.04))
                struck.append(windows_in(metrics))
            victim = chance.randrange(RANKS)
            victims.add(victim)
            kill(workers[victim])
        done = running.wait(timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert len(victims) > 1, "only one rank was ever killed"
    assert any(windows % 3 for windows in struck), "every kill was right after a checkpoint"
    assert "  resumed  after update" in done.stdout
    assert [line["update"] for line in metrics_of(killed)] == list(range(1, steps + 1))
    assert metrics_of(killed) == metrics_of(straight)
    first, second = state_of(straight), state_of(killed)
    for part in ("model", "optimizer", "data", "ranks"):
        assert_same_bits(first[part], second[part], part)


def state_of(run: Path) -> dict[str, Any]:
    found = Checkpoints(run / "checkpoints").load()
    state: dict[str, Any] = put_together(found.state, found.path, like=lambda _: None)
    return state
