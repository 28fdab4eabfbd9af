"""A manifest makes its run again, bit for bit; `--from` takes settings from any such file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import command, process, recipe
from tests.cli.helpers import NOISY, Ran, assert_same_bits, metrics_of, newest_checkpoint
from wholebatch.cli.run_folder import arithmetic_of, commit_of

__all__ = ["command", "process", "recipe"]  # fixtures of the command line, used here too

Command = Callable[..., Ran]
Write = Callable[..., Path]


def manifest_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    return found


def assert_same_end(one: Path, other: Path) -> None:
    first, second = newest_checkpoint(one), newest_checkpoint(other)
    for part in ("model", "optimizer", "data"):
        assert_same_bits(first[part], second[part], part)
    assert metrics_of(one) == metrics_of(other)


@pytest.mark.slow
def test_the_manifest_makes_the_run_again_in_a_new_process(
    command: Command, process: Command, recipe: Write, tmp_path: Path
) -> None:
    """Dropout, random samples, a schedule of the batch, a seed: the same bits at the end."""
    path = recipe(NOISY)
    options = ["--batch-size", "4@0,10@2", "--seed", 5, "--lr", 0.02, "--lr-rule", "sqrt"]
    options += ["--warmup", 3, "--steps", 5, "--betas", "beta2"]
    assert command("train", path, *options, "--out", "first").status == 0
    again = process("train", "--from", "first/manifest.json", "--out", "second")
    assert again.status == 0, again.err
    assert "note:" not in again.out
    assert_same_end(tmp_path / "first", tmp_path / "second")
    one, two = manifest_of(tmp_path / "first"), manifest_of(tmp_path / "second")
    assert one["settings"] == two["settings"]


def test_what_a_manifest_holds(command: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(NOISY)
    assert command("train", path, "--steps", 1, "--micro-batch", "auto", "--out", "run").status == 0
    found = manifest_of(tmp_path / "run")
    assert found["recipe"] == str(path)
    assert found["settings"]["micro_batch"] == 10  # what auto has chosen: a number makes it again
    assert found["settings"]["seed"] == found["seeds"]["seed"] == 0
    assert found["arithmetic"]["micro_batches"] == [[10]]
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]["threads"] == torch.get_num_threads()
    assert found["device"]["ranks"] == 1
    assert found["commit"] is None  # the recipe is in no repository


def test_the_command_line_wins_over_the_file(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(NOISY)
    options = ["--batch-size", "4@0,10@2", "--steps", 3]
    assert command("train", path, *options, "--out", "first").status == 0
    more = ["--from", "first/manifest.json", "--steps", 2, "--batch-size", 7]
    assert command("train", *more, "--out", "second").status == 0
    settings = manifest_of(tmp_path / "second")["settings"]
    assert (settings["steps"], settings["batch_size"]) == (2, 7)
    assert settings["batch_schedule"] is None
    assert [line["units"] for line in metrics_of(tmp_path / "second")] == [7, 7]


def test_settings_alone_are_enough(command: Command, recipe: Write, tmp_path: Path) -> None:
    """What `tune` writes: a recipe and settings, values as one would type them; the rest is its."""
    recipe(NOISY)
    tuned = {
        "recipe": "mine.py",
        "settings": {"batch_size": 12, "micro_batch": 3, "precision": "full", "lr": None},
        "measured": [{"micro_batch": 3}],
    }
    (tmp_path / "tune.json").write_text(json.dumps(tuned))
    ran = command("train", "--from", "tune.json", "--steps", 2, "--out", "run")
    assert ran.status == 0, ran.err
    assert [line["micro_batches"] for line in metrics_of(tmp_path / "run")] == [4, 4]
    tuned["settings"] = {
        "batch_size": "4@0,8@1",
        "micro_batch": "2",
        "noise": "off",
        "steps": "2",
        "lr": "1e-3",
        "checkpointing": False,
    }
    (tmp_path / "tune.json").write_text(json.dumps(tuned))
    assert command("train", "--from", "tune.json", "--out", "other").status == 0
    assert [line["units"] for line in metrics_of(tmp_path / "other")] == [4, 8]


def test_what_differs_here_is_said(command: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(NOISY)
    assert command("train", path, "--steps", 1, "--out", "run").status == 0
    found = manifest_of(tmp_path / "run")
    found["versions"]["torch"] = "1.0"
    found["device"]["ranks"] = 8
    (tmp_path / "old.json").write_text(json.dumps(found))
    path.write_text(path.read_text() + "\n# another\n")
    ran = command("train", "--from", "old.json", "--out", "again")
    assert ran.status == 0, ran.err
    for note in (
        "the recipe has changed since old.json was written",
        f"old.json was written with torch 1.0, here it is {torch.__version__}",
        "old.json was written by 8 ranks, here there are 1",
    ):
        assert f"note: {note}" in ran.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", 'has no object "settings"'),
        ("{}", 'has no object "settings"'),
        ('{"settings": {"colour": 1}}', "the setting 'colour' is none of train's"),
        ('{"settings": {"steps": 0}}', "steps 0: must be a whole number, at least 1"),
        ('{"settings": {"steps": "x"}}', "steps x: must be a whole number, at least 1"),
        ('{"settings": {"checkpointing": "no"}}', "checkpointing no: must be true or false"),
        ('{"settings": {"batch_size": "x"}}', "batch_size x: must be a whole number"),
        ('{"settings": {"warmup": "x"}}', "'x' must be a number of updates"),
        ('{"settings": {}, "recipe": 3}', '"recipe" must be a name'),
    ],
)
def test_a_wrong_file_is_one_clear_line(
    command: Command, tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "file.json").write_text(text)
    ran = command("train", "--from", "file.json")
    assert ran.status == 2
    assert "--from file.json" in ran.err
    assert message in ran.err


def test_from_does_not_go_with_resume(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"settings": {}}')
    ran = command("train", "--from", "file.json", "--resume")
    assert ran.status == 2
    assert "--from with --resume" in ran.err


def test_the_commit_is_that_of_a_tracked_file(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    file = tmp_path / "mine.py"
    file.write_text("a = 1\n")
    assert commit_of(file) is None
    git("init", "-q")
    assert commit_of(file) is None  # not tracked
    git("add", "mine.py")
    git("commit", "-q", "-m", "one")
    assert commit_of(file) == {"commit": git("rev-parse", "HEAD") + "", "changed": False}
    file.write_text("a = 2\n")
    found = commit_of(file)
    assert found is not None
    assert found["changed"]


def test_arithmetic_of_a_schedule_and_of_a_budget_of_tokens() -> None:
    parts = arithmetic_of(10, "4@0,10@2ep", micro_batch=4, ranks=2)
    assert [(part["from"], part["by"], part["shares"]) for part in parts] == [
        (0, "epochs", [2, 2]),
        (2, "epochs", [5, 5]),
    ]
    assert arithmetic_of(10, None, micro_batch=None, ranks=2) == {"global_batch": 10, "ranks": 2}
