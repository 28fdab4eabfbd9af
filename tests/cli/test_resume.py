"""A run that was stopped or killed, and resumed, ends as one that was not: bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.kills import kill
from tests.cli.helpers import (
    EXACT,
    NOISY,
    Ran,
    assert_same_bits,
    metrics_of,
    newest_checkpoint,
)

Command = Callable[..., Ran]
Write = Callable[..., Path]

LOADER = (
    "    return Points()",
    "    return torch.utils.data.DataLoader(Points(), batch_size=10, shuffle=True)",
)


def assert_same_run(one: Path, other: Path) -> None:
    first, second = newest_checkpoint(one), newest_checkpoint(other)
    for part in ("model", "optimizer", "data"):
        assert_same_bits(first[part], second[part], part)
    for part in ("random", "schedulers", "updates"):
        assert_same_bits(first["ranks"][0][part], second["ranks"][0][part], part)
    assert metrics_of(one) == metrics_of(other)


@pytest.mark.slow
def test_a_signal_finishes_the_window_saves_and_tells_how_to_go_on(
    process: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(NOISY)
    assert process("train", path, "--out", "straight").status == 0
    # Three micro-batches a window: the signal comes in the first of window 3.
    stopped = process("train", path, "--out", "stopped", STOP_AT="7", STOP_BY="SIGTERM")
    assert stopped.status == 130
    assert "stopped after update 3 of 6; checkpoint stopped/checkpoints/" in stopped.out
    assert "Continue with: wholebatch train --resume --out stopped\n" in stopped.out
    assert stopped.err == "stopping after this window (again: at once)\n"
    assert len(metrics_of(tmp_path / "stopped")) == 3
    resumed = process("train", "--resume", "--out", "stopped")
    assert resumed.status == 0, resumed.err
    assert "after update 3" in resumed.out
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


SOURCES = {"dataset": None, "loader": LOADER}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("stop_at", ["6", "13"])
def test_stopped_anywhere(
    command: Command,
    recipe: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    stop_at: str,
) -> None:
    """At a window's last micro-batch, and in the next epoch."""
    data = SOURCES[source]
    path = recipe(NOISY, *([data] if data else []))
    assert command("train", path, "--out", "straight").status == 0
    monkeypatch.setenv("STOP_AT", stop_at)
    assert command("train", path, "--out", "stopped").status == 130
    monkeypatch.delenv("STOP_AT")
    ran = command("train", "--resume", "--out", "stopped")
    assert ran.status == 0, ran.err
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.distributed)], ids=["one", "two"]
)
def test_kills_lose_nothing(ranks: int, tmp_path: Path) -> None:
    """`make kills` kills 20 times; here a few."""
    assert kill(tmp_path, ranks=ranks, kills=2, seed=1)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(process: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(NOISY)
    ran = process("train", path, "--out", "here", STOP_AT="8", STOP_TIMES="2")
    assert ran.status == 130
    assert ran.err == "stopping after this window (again: at once)\naborted\n"
    assert "stopped" not in ran.out
    assert process("train", "--resume", "--out", "here").status == 0
    assert len(metrics_of(tmp_path / "here")) == 6


def test_a_damaged_checkpoint_is_one_clear_line(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(NOISY)
    assert command("train", path, "--out", "straight").status == 0
    assert command("train", path, "--out", "hurt").status == 0
    newest = tmp_path / "hurt/checkpoints/window-00000006"
    (newest / "state.pt").write_bytes((newest / "state.pt").read_bytes()[:1000])
    ran = command("train", "--resume", "--out", "hurt")
    assert (ran.status, ran.err) == (
        2,
        "error: hurt/checkpoints/window-00000006 is damaged: the checksum of state.pt is wrong; "
        "remove it to go on from window-00000004\n",
    )
    shutil.rmtree(newest)
    assert command("train", "--resume", "--out", "hurt").status == 0
    assert_same_run(tmp_path / "straight", tmp_path / "hurt")


def test_a_checkpoint_of_another_model_names_what_differs(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(EXACT)
    assert command("train", path, "--out", "here").status == 0
    before = sorted((tmp_path / "here").rglob("*"))
    recipe(EXACT, ("(5, 8)", "(5, 9)"), ("(8, 3)", "(9, 3)"))
    ran = command("train", path, "--resume", "--out", "here", "--updates", 9)
    assert ran.status == 2
    assert "does not fit this recipe's model: Error(s) in loading state_dict" in ran.err
    assert ran.err.count("\n") == 1
    assert sorted((tmp_path / "here").rglob("*")) == before


def test_another_optimizer_and_other_data_are_refused(command: Command, recipe: Write) -> None:
    path = recipe(EXACT)
    assert command("train", path, "--out", "here").status == 0
    recipe(EXACT, ("(24, 5,", "(27, 5,"), ("arange(24)", "arange(27)"))
    ran = command("train", "--resume", "--out", "here", "--updates", 9)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "the data has changed: the run was on a dataset of 24 samples" in ran.err
    groups = """
def optimizer(model):
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}])
"""
    recipe(EXACT + groups)
    ran = command("train", "--resume", "--out", "here", "--updates", 9)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "does not fit this recipe's optimizer" in ran.err
    recipe(
        EXACT + "\ndef optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=1)\n"
    )
    ran = command("train", "--resume", "--out", "here", "--updates", 9)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "is of another optimizer: momentum" in ran.err


def test_a_changed_recipe_is_noted_and_a_changed_setting_refused(
    command: Command, recipe: Write
) -> None:
    path = recipe(EXACT)
    assert command("train", path, "--updates", 3, "--out", "here").status == 0
    recipe(EXACT + "\n# changed\n")
    ran = command("train", "--resume", "--updates", 5, "--out", "here")
    assert ran.status == 0, ran.err
    assert "after update 3" in ran.out
    assert f"note: {path} has changed since this run began" in ran.out
    ran = command("train", "--resume", "--batch-size", 12, "--out", "here")
    assert ran.status == 2
    assert "--batch-size 12: the run that --resume continues has 10" in ran.err


def test_a_run_is_written_by_one_process(command: Command, recipe: Write, tmp_path: Path) -> None:
    import fcntl

    assert command("train", recipe(EXACT), "--out", "here").status == 0
    with (tmp_path / "here/.lock").open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        ran = command("train", "--resume", "--out", "here", "--updates", 9)
    assert ran.status == 2
    assert ran.err == "error: here is being written by another process; wait, or stop it\n"


def test_resume_begins_a_run_that_is_not_there(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(NOISY)
    assert command("train", path, "--out", "straight").status == 0
    assert command("train", path, "--resume", "--out", "here").status == 0
    assert_same_run(tmp_path / "straight", tmp_path / "here")
