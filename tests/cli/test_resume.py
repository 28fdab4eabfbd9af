"""A run that was stopped or killed, and resumed, ends as one that was not: bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import processes
from tests.cli.helpers import (
    EXACT,
    NOISY,
    Ran,
    assert_same_bits,
    environment_of,
    metrics_of,
    newest_checkpoint,
)

Command = Callable[..., Ran]
Write = Callable[..., Path]

STREAM = (
    "    return Points()",
    "    points = Points()\n    return (points[index] for index in range(37))",
)
LOADER = (
    "    return Points()",
    "    return torch.utils.data.DataLoader(Points(), batch_size=10, shuffle=True)",
)


def assert_same_run(one: Path, other: Path) -> None:
    first, second = newest_checkpoint(one), newest_checkpoint(other)
    for part in ("model", "optimizer", "data"):
        assert_same_bits(first[part], second[part], part)
    for part in ("random", "schedulers", "updates"):
        assert_same_bits(first["train"][part], second["train"][part], part)
    assert metrics_of(one) == metrics_of(other)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_stopped_by_a_signal_and_resumed_in_a_new_process(
    process: Command, recipe: Write, tmp_path: Path, number: str
) -> None:
    path = recipe(NOISY)
    assert process("train", path, "--out", "straight").status == 0
    # Three micro-batches a window: the signal comes in the first of window 3, which is finished.
    stopped = process("train", path, "--out", "stopped", STOP_AT="7", STOP_BY=number)
    assert stopped.status == 130
    assert "stopped after update 3 of 6" in stopped.out
    assert "Continue with: " in stopped.out
    assert "train --resume --out stopped\n" in stopped.out
    assert stopped.err == ""
    assert (tmp_path / "stopped/checkpoints/window-00000003.pt").exists()
    assert len(metrics_of(tmp_path / "stopped")) == 3
    resumed = process("train", "--resume", "--out", "stopped")
    assert resumed.status == 0, resumed.err
    assert "after update 3" in resumed.out
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize("data", [None, STREAM, LOADER], ids=["dataset", "stream", "loader"])
@pytest.mark.parametrize("stop_at", ["1", "3", "5", "11", "13"])
def test_stopped_anywhere(
    command: Command,
    recipe: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: tuple[str, str] | None,
    stop_at: str,
) -> None:
    """Also before the first update, at a window's last micro-batch, and in the next epoch."""
    path = recipe(NOISY, *([data] if data else []))
    assert command("train", path, "--out", "straight").status == 0
    monkeypatch.setenv("STOP_AT", stop_at)
    assert command("train", path, "--out", "stopped").status == 130
    monkeypatch.delenv("STOP_AT")
    ran = command("train", "--resume", "--out", "stopped")
    assert ran.status == 0, ran.err
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def test_stopped_again_and_again(
    command: Command, recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(NOISY)
    assert command("train", path, "--out", "straight").status == 0
    monkeypatch.setenv("STOP_AT", "2")
    status, times = command("train", path, "--out", "stopped").status, 1
    while status == 130:
        status, times = command("train", "--resume", "--out", "stopped").status, times + 1
    assert status == 0
    assert times > 5
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def test_a_longer_run_goes_on_from_a_finished_one(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(NOISY)
    assert command("train", path, "--out", "straight", "--steps", 9).status == 0
    assert command("train", path, "--out", "longer", "--steps", 5).status == 0
    again = command("train", "--resume", "--out", "longer")
    assert again.status == 0
    assert "nothing to do: the run has its 5 updates; give --steps for more" in again.out
    assert command("train", "--resume", "--out", "longer", "--steps", 9).status == 0
    assert_same_run(tmp_path / "straight", tmp_path / "longer")


@pytest.mark.slow
def test_kill_9_leaves_the_last_good_checkpoint_and_each_window_once(
    process: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(NOISY)
    steps = ("--steps", "60", "--checkpoint-every", "7")
    assert process("train", path, "--out", "straight", *steps).status == 0
    killed = tmp_path / "killed"
    arguments: tuple[object, ...] = ("train", path, "--out", "killed", *steps)
    for windows in (9, 30):
        running = processes.Started(
            "wholebatch.cli",
            [str(argument) for argument in arguments],
            folder=tmp_path,
            cwd=tmp_path,
            environment=environment_of(),
        )
        wait_for_lines(running, killed / "metrics.jsonl", windows)
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait(timeout=60).returncode == -signal.SIGKILL
        arguments = ("train", "--resume", "--out", "killed")
    ran = process(*arguments)
    assert ran.status == 0, ran.err
    assert_same_run(tmp_path / "straight", killed)


def wait_for_lines(running: processes.Started, path: Path, lines: int) -> None:
    deadline = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert running.status is None, running.wait(timeout=0)
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(process: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(NOISY)
    ran = process("train", path, "--out", "here", STOP_AT="8", STOP_TIMES="2")
    assert ran.status == 130
    assert ran.err == "aborted\n"
    assert "stopped" not in ran.out
    assert not list((tmp_path / "here/checkpoints").glob("*+*"))
    assert process("train", "--resume", "--out", "here").status == 0
    assert len(metrics_of(tmp_path / "here")) == 6


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(NOISY)
    assert command("train", path, "--out", "straight").status == 0
    assert command("train", path, "--out", "hurt").status == 0
    newest = tmp_path / "hurt/checkpoints/window-00000006.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    ran = command("train", "--resume", "--out", "hurt")
    assert ran.status == 0, ran.err
    assert "window-00000006.pt is damaged: " in ran.out
    assert "going back to window-00000004.pt" in ran.out
    assert newest.with_suffix(".damaged").exists()
    assert_same_run(tmp_path / "straight", tmp_path / "hurt")


def test_only_damaged_checkpoints_are_one_clear_line(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    assert command("train", recipe(NOISY), "--out", "hurt").status == 0
    for path in (tmp_path / "hurt/checkpoints").iterdir():
        path.write_bytes(b"rubbish")
    ran = command("train", "--resume", "--out", "hurt")
    assert ran.status == 2
    assert ran.err.startswith("error: hurt/checkpoints/window-00000006.pt is damaged: ")
    assert ran.err.count("\n") == 1


def test_a_checkpoint_of_another_model_names_what_differs(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(EXACT)
    assert command("train", path, "--out", "here").status == 0
    before = sorted((tmp_path / "here").rglob("*"))
    recipe(EXACT, ("(5, 8)", "(5, 9)"), ("(8, 3)", "(9, 3)"))
    ran = command("train", path, "--resume", "--out", "here", "--steps", 9)
    assert ran.status == 2
    assert "is of another model: 0.weight has shape 8×5 there and 9×5 here" in ran.err
    assert ran.err.count("\n") == 1
    assert sorted((tmp_path / "here").rglob("*")) == before


def test_another_optimizer_and_other_data_are_refused(command: Command, recipe: Write) -> None:
    path = recipe(EXACT)
    assert command("train", path, "--out", "here").status == 0
    recipe(EXACT, ("(24, 5,", "(27, 5,"), ("arange(24)", "arange(27)"))
    ran = command("train", "--resume", "--out", "here", "--steps", 9)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "the data has changed: the run was on a dataset of 24 samples" in ran.err
    groups = """
def optimizer(model):
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}])
"""
    recipe(EXACT + groups)
    ran = command("train", "--resume", "--out", "here", "--steps", 9)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "does not fit this recipe's optimizer" in ran.err


def test_resume_finds_the_newest_run_and_notes_a_changed_recipe(
    command: Command, recipe: Write
) -> None:
    path = recipe(EXACT)
    for steps in (2, 3):
        assert command("train", path, "--steps", steps).status == 0
    recipe(EXACT + "\n# changed\n")
    ran = command("train", "--resume", "--steps", 5)
    assert ran.status == 0, ran.err
    assert "after update 3" in ran.out
    assert f"note: {path} has changed since this run began" in ran.out
    ran = command("train", "--resume", "--batch-size", 12)
    assert ran.status == 2
    assert "--batch-size 12: the run that --resume continues has 10" in ran.err


def test_a_run_is_written_by_one_process(command: Command, recipe: Write, tmp_path: Path) -> None:
    import fcntl

    assert command("train", recipe(EXACT), "--out", "here").status == 0
    with (tmp_path / "here/.lock").open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        ran = command("train", "--resume", "--out", "here", "--steps", 9)
    assert ran.status == 2
    assert ran.err == "error: here is being written by another process; wait, or stop it\n"
