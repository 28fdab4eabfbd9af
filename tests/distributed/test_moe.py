"""The balance loss of a mixture of experts over two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reports(Path(__file__).with_name("moe_worker.py"), 2, tmp_path_factory.mktemp("moe"))


def test_the_update_is_that_of_the_global_batch(report: dict[str, Any]) -> None:
    own = report.pop("Trainer")
    assert len(report) == 3
    assert max(report.values()) <= EXACT, report
    assert own > 0.01  # transformers 48690: the balance of each rank, times the ranks
