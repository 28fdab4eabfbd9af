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
    assert len(found) == 3
    wrong = {name: row for name, row in found.items() if max(row.values()) > 10 * EXACT}
    assert not wrong
