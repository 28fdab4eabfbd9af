"""`wholebatch rate` and `wholebatch rival`, as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.helpers import EXACT, Ran


def test_rate_and_rival(
    command: Callable[..., Ran], recipe: Callable[..., Path], tmp_path: Path
) -> None:
    path = recipe(EXACT)
    ran = command("rate", path, "--updates", 20, "--micro-batch", 5, "--out", "rate.json")
    assert ran.status == 0, ran.err
    assert "steepest fall at" in ran.out
    assert len(json.loads((tmp_path / "rate.json").read_text())["curves"][0]["x"]) == 20
    ran = command("rival", path, "--seconds", 0.01, "--micro-batch", 5, "--json")
    assert ran.status == 0, ran.err
    rows = json.loads(ran.out)["rows"]
    assert [row["batch"] for row in rows] == [10, 5]
    assert (tmp_path / "rival.html").exists()
    assert "must be numbers above 0" in command("rival", path, "--rates", "fast").err
