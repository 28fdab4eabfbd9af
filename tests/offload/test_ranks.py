"""Under DDP on two ranks: gradients on the host, released, and in the moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.distributed
@pytest.mark.slow
def test_every_store_makes_the_update_of_the_global_batch(tmp_path: Path) -> None:
    found = reports(WORKER, 2, tmp_path)
    assert len(found) >= 39
    wrong = {}
    for name, row in found.items():
        limit = 10 * EXACT if "adamw" in name else EXACT
        limit, rounded = (1e-5, 5e-3) if "float32" in name else (limit, 1e-6)
        if any(value > (rounded if "rounded" in key else limit) for key, value in row.items()):
            wrong[name] = row
    assert not wrong
