"""Which run a command means when a launcher starts it again, told by the environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import EXACT, Ran, metrics_of

Command = Callable[..., Ran]
Write = Callable[..., Path]


def test_auto_resume_begins_and_continues(command: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(EXACT)
    line = ("train", path, "--out", "here", "--auto-resume")
    begun = command(*line, "--steps", 2)
    assert begun.status == 0, begun.err
    assert "resumed" not in begun.out
    went_on = command(*line, "--steps", 4)
    assert went_on.status == 0, went_on.err
    assert "after update 2" in went_on.out
    assert "nothing to do" in command(*line, "--steps", 4).out
    assert [record["update"] for record in metrics_of(tmp_path / "here")] == [1, 2, 3, 4]


def test_a_restart_goes_on_with_the_same_line(
    command: Command, recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(EXACT)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")  # it died before it had begun
    assert "resumed" not in command("train", path, "--out", "here", "--steps", 2).out
    again = command("train", path, "--out", "here", "--steps", 3)
    assert again.status == 0, again.err
    assert "after update 2" in again.out
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    refused = command("train", path, "--out", "here", "--steps", 4)
    assert refused.status == 2
    assert "has a run already; continue it with --resume" in refused.err


def test_without_out_the_folder_is_that_of_the_job(
    command: Command, recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(EXACT)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    refused = command("train", path)
    assert refused.status == 2
    assert "a restart must find its run; give --out" in refused.err
    unknown = command("train", path, "--auto-resume")
    assert unknown.status == 2
    assert "--auto-resume: which run to continue is not known; say where" in unknown.err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job/7")
    assert command("train", path, "--steps", 2).status == 0
    assert (tmp_path / "runs/mine-job_7/metrics.jsonl").exists()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "nothing to do" in command("train", path, "--steps", 2).out
