"""The additivity test runs losses that talk to other ranks equally often on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports

WORKER = Path(__file__).with_name("additivity_worker.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reports(WORKER, 2, tmp_path_factory.mktemp("additivity"))


@pytest.mark.slow
def test_ranks_that_find_different_things_stay_in_step(report: dict[str, Any]) -> None:
    assert report["distance"] <= 1e-12


@pytest.mark.slow
def test_a_loss_that_compares_over_ranks_is_refused(report: dict[str, Any]) -> None:
    assert "compare" in report["refused"]
    assert "wb.Coupled" in report["refused"]
