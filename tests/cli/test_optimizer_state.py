"""`--optimizer-state` of train and verify: the same run, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.helpers import EXACT, Ran, assert_same_bits, newest_checkpoint

Command = Callable[..., Ran]
Write = Callable[..., Path]


def test_train_makes_the_same_run(command: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(EXACT)
    for name in ("device", "host"):
        ran = command("train", path, "--optimizer-state", name, "--out", name)
        assert ran.status == 0, ran.err
    one, other = (newest_checkpoint(tmp_path / name) for name in ("device", "host"))
    assert_same_bits(one["model"], other["model"])
    config = json.loads((tmp_path / "host" / "config.json").read_text())
    assert config["settings"]["optimizer_state"] == "host"


def test_verify_finds_the_same_update(command: Command, recipe: Write) -> None:
    assert command("verify", recipe(EXACT), "--optimizer-state", "host").status == 0
