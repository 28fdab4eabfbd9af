"""A rank that makes no progress: for how long, who it is, and how the command ends."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.cli.helpers import NOISY, metrics_of
from wholebatch.cli import main
from wholebatch.cli.checkpoints import Checkpoints
from wholebatch.distributed.rank_failure import Progress, _blame, parse_deadline, place_of
from wholebatch.errors import OptionError

# Rank 1 sleeps in its data: no thread of its own says that it lives, but the alarm's does.
SLEEPY = NOISY.replace(
    "    def __getitem__(self, index):\n",
    "    reads = 0\n"
    "    def __getitem__(self, index):\n"
    "        Points.reads += 1\n"
    "        if os.environ.get('RANK') == '1' and Points.reads == 18:\n"
    "            import time; time.sleep(1000)\n",
)


def stand(
    count: int, *, waits: bool = False, place: str = "x.py:3, in f", error: Any = None
) -> Any:
    return {"count": count, "waits": waits, "place": place, "error": error}


def test_who_is_silent() -> None:
    waiting = stand(9, waits=True)
    assert _blame({0: waiting, 1: stand(8)}, 2) == (
        [1],
        "rank 1 made no progress {since}: rank 1 stands at x.py:3, in f",
    )
    ranks, said = _blame({0: waiting, 2: stand(8)}, 4)
    assert ranks == [1, 3]
    assert said.startswith("ranks 1, 3 made no progress {since} and do not answer: stopped, ")
    ranks, said = _blame({0: waiting, 1: stand(7), 2: stand(8)}, 3)
    assert ranks == [1]  # the one that has come least far
    ranks, said = _blame({0: waiting, 1: stand(7, error="ValueError: {x}")}, 2)
    assert said.format(since="").endswith(", after an error in its last window: ValueError: {x}")
    ranks, said = _blame({0: waiting, 1: stand(9, waits=True, place="y.py:4, in g")}, 2)
    assert ranks == [0, 1]
    assert said.endswith("all wait in collectives, rank 0 at x.py:3, in f; rank 1 at y.py:4, in g")


def test_the_deadline_follows_the_slowest_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHOLEBATCH_DEADLINE", raising=False)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(patience=1000.0)
    progress.least = 300.0
    for seconds in (50.0, 2.0, 2.0):
        assert progress.idle == 0.0  # between windows nothing is counted
        now[0] += 5000.0
        progress.begin()
        assert progress.deadline == (1000.0 if progress.windows < 2 else 500.0)
        now[0] += seconds
        assert progress.idle == seconds
        progress.end()
    assert progress.deadline == 500.0  # ten times 50 s
    monkeypatch.setenv("WHOLEBATCH_DEADLINE", "60")
    assert Progress(patience=1000.0).deadline == 60.0
    monkeypatch.setenv("WHOLEBATCH_DEADLINE", "off")
    assert Progress(patience=1000.0).deadline == float("inf")


def test_an_error_of_a_window_is_remembered_until_one_goes_well() -> None:
    progress = Progress(patience=10.0)

    def fails() -> None:
        progress.begin()
        try:
            raise ValueError("sample 17 is broken")
        finally:
            progress.end()

    with pytest.raises(ValueError, match="sample 17"):
        fails()
    assert progress.error == "ValueError: sample 17 is broken"
    try:
        raise KeyError("handled")
    except KeyError:  # a window that goes well, made where another error is handled
        progress.begin()
        progress.end()
    assert progress.error is None


def test_a_collective_outside_a_window_counts_only_while_it_is_waited_for() -> None:
    progress = Progress(patience=10.0)
    with progress.waiting():
        assert progress.position()["waits"]
        time.sleep(0.01)
        assert progress.idle > 0.0
    assert progress.idle == 0.0
    assert not progress.position()["waits"]


def test_where_a_thread_stands() -> None:
    inside, over = threading.Event(), threading.Event()

    def stands_here() -> None:
        inside.set()
        over.wait()

    thread = threading.Thread(target=stands_here)
    thread.start()
    inside.wait()
    place, in_collective = place_of(thread)
    over.set()
    thread.join()
    assert "test_deadline.py:" in place
    assert ", in stands_here (inside threading.py:" in place
    assert not in_collective


def test_deadlines_that_are_none() -> None:
    for text in ("0", "-3", "nan", "inf", "soon"):
        with pytest.raises(OptionError, match=f"--deadline {text}: must be seconds above 0"):
            parse_deadline(text, "--deadline")


def test_the_command_refuses_one_before_it_begins(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "--deadline", "soon"]) == 2
    assert capfd.readouterr().err.startswith("error: --deadline soon: must be seconds above 0")
    monkeypatch.setenv("WHOLEBATCH_DEADLINE", "never")
    assert main(["train"]) == 2
    assert "error: WHOLEBATCH_DEADLINE never: must be seconds above 0" in capfd.readouterr().err


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_sleeps_in_its_data_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY, encoding="utf-8")
    done = processes.run(
        "wholebatch.cli",
        *("train", "sleepy.py", "--out", "run", "--checkpoint-every", "1", "--deadline", "10"),
        cwd=tmp_path,
        environment={**os.environ, **processes.ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
        timeout=240,
        ranks=2,
    )
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if "rank 1 made no progress for " in line]
    assert told, done.stderr[-3000:]
    assert told[0].startswith("error: rank 1 made no progress for ")
    assert "sleepy.py:" in told[0]
    assert "in __getitem__. All ranks stop" in told[0]
    assert "  continue from the last checkpoint: torchrun " in done.stderr
    assert "Traceback" not in done.stderr.split("ChildFailedError")[0].split("api.py")[0]
    # What was saved before is whole, and goes on where nobody sleeps.
    windows = Checkpoints(tmp_path / "run/checkpoints").load().state["train"]["updates"]
    assert windows >= 1
    assert main(["train", "--resume", "--out", str(tmp_path / "run")]) == 0
    assert [record["update"] for record in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
