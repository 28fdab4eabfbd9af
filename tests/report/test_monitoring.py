"""What TensorBoard and Weights & Biases are given: every number of every window, resumed too."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.cli.conftest import command, recipe
from tests.cli.helpers import EXACT, NOISY, Ran, environment_of, metrics_of
from wholebatch.cli.report.metrics_writers import WandbRun, record_of, scalars_of
from wholebatch.errors import MissingExtraError
from wholebatch.window.window import Step

__all__ = ["command", "recipe"]  # fixtures of the command line, used here too

Command = Callable[..., Ran]
Write = Callable[..., Path]

WATCHED = {
    "loss",
    "grad_norm",
    "units_per_second",
    "memory",
    "recoveries",
    "skipped_windows",
    "noise_scale",
    "communication",
    "lr",
}


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wandb_history(file: Path) -> Iterator[dict[str, Any]]:
    """The history in an offline run's file: records in blocks of 32 KiB, as LevelDB's logs."""
    from wandb.proto import wandb_internal_pb2

    raw = file.read_bytes()
    place, parts = 7, []  # after the header of the file
    while place + 7 <= len(raw):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + 7])
        parts.append(raw[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            if record.WhichOneof("record_type") == "history":
                yield {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }


def test_tensorboard_has_everything_that_is_watched(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ran = command("train", recipe(NOISY), "--steps", 9, "--noise", 2, "--out", "run")
    assert ran.status == 0, ran.err
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert set(read.Tags()["scalars"]) >= WATCHED
    lines = lines_of(tmp_path / "run")
    for name in ("loss", "grad_norm", "memory"):
        drawn = [one.value for one in read.Scalars(name)]
        assert drawn == pytest.approx([line[name] for line in lines], rel=1e-6)
    measured = [line["window"] for line in lines if "noise_scale" in line]
    assert measured == [5, 7, 9]  # after every second window; the first one alone says nothing
    assert all(line["memory"] > 0 for line in lines)


@pytest.mark.slow
def test_wandb_offline_and_resumed(recipe: Write, tmp_path: Path) -> None:
    """In a process of its own: wandb keeps a service beside the one that asks."""
    path = recipe(NOISY)
    begun = ["train", str(path), "--steps", "4", "--wandb", "tests", "--noise", "2", "--out", "run"]
    resumed = ["train", "--resume", "--steps", "9", "--out", "run"]
    code = (
        "import pathlib, sys; from wholebatch.cli import main\n"
        f"status = main({begun!r})\n"
        "pathlib.Path('first.json').write_text(pathlib.Path('run/wandb.json').read_text())\n"
        f"sys.exit(status or main({resumed!r}))"
    )
    script = tmp_path / "twice.py"
    script.write_text(code, encoding="utf-8")
    done = processes.run(
        script,
        cwd=tmp_path,
        environment=environment_of(WANDB_MODE="offline", WANDB_SILENT="true"),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "first.json").read_text())
    assert json.loads((tmp_path / "run" / "wandb.json").read_text()) == first
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{first['id']}/*.wandb"))
    rows = [row for file in files for row in wandb_history(file)]
    lines = lines_of(tmp_path / "run")
    assert [row["window"] for row in rows] == [line["window"] for line in lines]
    assert [row["loss"] for row in rows] == [line["loss"] for line in lines]
    assert set().union(*rows) >= WATCHED


def test_without_wandb_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[wandb\]'"):
        WandbRun("tests", folder=tmp_path, manifest={}, resumed=False)


def test_numbers_that_cannot_be_drawn_are_left_out() -> None:
    step = Step(update=1, loss=float("nan"), units=4.0, grad_norm=1.0, micro_batches=1, seconds=0.0)
    record = record_of(
        step,
        window=1,
        epoch=0,
        lr=[0.1, 0.2],
        now=1.0,
        more={"noise_scale": float("inf"), "memory": None, "recoveries": 2, "advice": "keep"},
    )
    drawn = scalars_of(record)
    assert drawn["recoveries"] == 2.0
    assert (drawn["lr/0"], drawn["lr/1"]) == (0.1, 0.2)
    assert not {"loss", "noise_scale", "memory", "advice", "units_per_second"} & drawn.keys()


def test_the_noise_scale_survives_a_stop(
    command: Command, recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same estimates as without the stop."""
    path = recipe(NOISY)
    options = ["--steps", 8, "--noise", 2]
    assert command("train", path, *options, "--out", "straight").status == 0
    monkeypatch.setenv("STOP_AT", "11")  # window 4, of three micro-batches
    assert command("train", path, *options, "--out", "stopped").status == 130
    monkeypatch.delenv("STOP_AT")
    assert command("train", "--resume", "--out", "stopped").status == 0
    assert metrics_of(tmp_path / "straight") == metrics_of(tmp_path / "stopped")


def test_the_advice_is_said_at_the_end(command: Command, recipe: Write) -> None:
    path = recipe(EXACT)
    ran = command("train", path, "--steps", 6, "--noise", 1, "--out", "run")
    assert ran.status == 0, ran.err
    assert "batch size" in ran.out
    ran = command("train", path, "--steps", 6, "--noise", "off", "--out", "off")
    assert "batch size" not in ran.out
