"""`--gradients` of train and verify: the same run, an approximation that says so, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import EXACT, Ran, assert_same_bits, newest_checkpoint

Command = Callable[..., Ran]
Write = Callable[..., Path]


@pytest.mark.parametrize("gradients", ["host", "release"])
def test_train_makes_the_same_run(
    command: Command, recipe: Write, tmp_path: Path, gradients: str
) -> None:
    path = recipe(EXACT)
    for name in ("device", gradients):
        ran = command("train", path, "--gradients", name, "--out", name)
        assert ran.status == 0, ran.err
    one, other = (newest_checkpoint(tmp_path / name) for name in ("device", gradients))
    assert_same_bits(one["model"], other["model"])
    config = json.loads((tmp_path / gradients / "config.json").read_text())
    assert config["settings"]["gradients"] == gradients


def test_verify_calls_moments_approximate_and_the_others_the_same(
    command: Command, recipe: Write
) -> None:
    path = recipe(EXACT)
    assert command("verify", path, "--gradients", "host").status == 0
    ran = command("verify", path, "--gradients", "moments")
    assert ran.status == 1
    assert "an approximation, as asked for" in ran.out
    found = json.loads(command("verify", path, "--gradients", "moments", "--json").out)
    assert found["approximate"] is True
    assert found["same"] is False
    assert 1e-12 < found["update"]["distance"] < 0.01


def test_refusals(command: Command, recipe: Write) -> None:
    ran = command("train", recipe(EXACT), "--gradients", "disk")
    assert ran.status == 2
    assert "must be one of device, host, swap, release, moments" in ran.err
    ran = command("train", recipe(EXACT), "--gradients", "moments", "--clip-norm", 1)
    assert ran.status == 2
    assert "clipping needs the whole gradient" in ran.err.replace("\n", " ")
