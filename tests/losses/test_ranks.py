"""Named means and preference losses over two ranks that have different micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports
from tests.losses.preferences import OURS
from tests.losses.problem import MEANS
from tests.support import EXACT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    worker = Path(__file__).with_name("ranks_worker.py")
    return reports(worker, 2, tmp_path_factory.mktemp("losses"))


@pytest.mark.parametrize("name", [*MEANS, "terms", *OURS])
def test_the_update_is_that_of_the_global_batch(report: dict[str, Any], name: str) -> None:
    exact, naive = report[name]
    assert exact <= EXACT
    assert naive > 0.02, "the mean of micro-batch means must be another loss"


def test_a_rank_without_data_joins_announced_windows(report: dict[str, Any]) -> None:
    assert report["out of data"] <= EXACT
