"""`wholebatch tune` under torchrun: ranks decide alike, and what travels between them is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.helpers import EXACT
from tests.distributed.launch import torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EXACT, encoding="utf-8")
    out = tmp_path / "tune.json"
    done = torchrun(
        Path(__file__).parent / "worker.py",
        2,
        "tune",
        str(tmp_path / "mine.py"),
        "--batch-size",
        "8",
        "--micro-batch",
        "4,2",
        "--out",
        str(out),
    )
    assert done.stdout.count("Train with these settings:") == 1  # the first rank speaks for both
    data = json.loads(out.read_text())
    assert data["measured_on_ranks"] == 2
    assert data["settings"]["batch_size"] == 8  # of both; each has four
    assert {trial["micro_batch"] for trial in data["trials"]} == {4, 2}
    best = next(trial for trial in data["trials"] if trial["recommended"])
    assert best["units_per_second"] > 0
    ranks = data["ranks"]
    assert ranks["bandwidth_measured"] is True
    assert ranks["is_model"] is True
    assert ranks["bandwidth"] > 0
    # Each rank brings four of a window's eight samples, also in the model of more ranks.
    for point in ranks["points"]:
        brought = point["units_per_second"] * point["seconds"] / point["ranks"]
        assert brought == pytest.approx(4.0, rel=1e-6)
    two = next(point for point in ranks["points"] if point["ranks"] == 2)
    assert two["units_per_second"] <= 1.001 * best["units_per_second"] * (
        best["seconds"] / (best["seconds"] - best["split"].get("communication", 0.0))
    )
