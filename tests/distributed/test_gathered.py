"""FSDP2 with parameters gathered once per window: exact, recorded, with one collective each way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

WORKER = Path(__file__).with_name("gathered_worker.py")


@pytest.mark.distributed
@pytest.mark.slow
def test_gathered_windows(tmp_path: Path) -> None:
    """One job for all cases: starting it takes longer than what it does."""
    for rank in reports(WORKER, 2, tmp_path)["ranks"]:
        _check_rank(rank)


def _check_rank(found: dict[str, Any]) -> None:
    assert len(found["errors"]) == 6
    wrong = {
        case: row
        for case, row in found["errors"].items()
        if row["gradients"] > EXACT or row["update"] > (10 * EXACT if "adamw" in case else EXACT)
    }
    assert not wrong
    # Two blocks and the root, each gathered and scattered once, for 1, 2 and 5 micro-batches.
    each = {"allgather_base": 3, "reduce_scatter_base": 3}
    assert found["collectives"] == dict.fromkeys("125", each)
    off = found["sixteen bit"]
    assert 1e-4 < off["gathered"] <= 1.25 * off["hold"]
    for sync, row in found["compiled blocks"].items():
        assert max(row.values()) <= EXACT, sync
    refused = found["refused"]
    assert "take the micro-batches from acc.over(loader)" in refused["forward before the window"]
    # On a GPU trial steps are measured, and the ranks take the smallest size of all.
    alone, other = (
        "OutOfMemoryError: a micro-batch of one sample",
        "RankError: another rank ran out",
    )
    assert refused["no room on one rank"].startswith((alone, other))
    assert refused["shards after it"] == "True"
