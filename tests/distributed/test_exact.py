"""The update on many ranks is that of one process on the undivided global batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

WORKER = Path(__file__).with_name("exact_worker.py")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "engines"), [(2, ["ddp", "fsdp2"]), (4, ["hsdp"])])
def test_every_case_of(ranks: int, engines: list[str], tmp_path: Path) -> None:
    """One job for all engines: starting it takes longer than what it does."""
    report = reports(WORKER, ranks, tmp_path, *engines)
    found = report["errors"]
    assert list(found) == engines
    assert sum(map(len, found.values())) >= (30 if ranks == 2 else 5)
    # Adam's square root amplifies rounding: its updates are held to ten times the floor.
    wrong = {
        (engine, case): row
        for engine, cases in found.items()
        for case, row in cases.items()
        if row["gradients"] > EXACT or row["update"] > (10 * EXACT if "adamw" in case else EXACT)
    }
    assert not wrong
    if engines == ["hsdp"]:  # gathered and scattered once; the shards of replicas are added up
        once = {"allgather_base": 3, "reduce_scatter_base": 3, "allreduce": 3}
        assert report["collectives"] == once
        return
    for refused in report["refusals"]:
        shared = refused["ddp"]
        assert "accumulators of 2 and 3 steps" in shared["steps"]
        assert "give them to wb.over in the order of their backwards" in shared["order"]
        assert "several accumulators in one loop need it on every rank" in shared["first"]
        assert "announce() on several ranks, with several accumulators" in shared["announce"]
        assert "needs every rank in every forward" in refused["fsdp2"]["no data"]
