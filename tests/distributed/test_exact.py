"""The update on many ranks is that of one process on the undivided global batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

WORKER = Path(__file__).with_name("exact_worker.py")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "ranks"), [("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)]
)
def test_every_case_of(engine: str, ranks: int, tmp_path: Path) -> None:
    found = reports(WORKER, ranks, tmp_path, engine)
    assert len(found) >= 12
    # Adam's square root amplifies rounding: its updates are held to ten times the floor.
    wrong = {
        case: row
        for case, row in found.items()
        if row["gradients"] > EXACT or row["update"] > (10 * EXACT if "adamw" in case else EXACT)
    }
    assert not wrong
