"""Under DDP on two ranks: optimizer state on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.distributed
@pytest.mark.slow
def test_the_update_of_the_global_batch(tmp_path: Path) -> None:
    found = reports(WORKER, 2, tmp_path)
    assert len(found) == 12
    wrong = {}
    for name, row in found.items():
        limit = 10 * EXACT if "adamw" in name else EXACT
        if any(value > limit for value in row.values()):
            wrong[name] = row
    assert not wrong
