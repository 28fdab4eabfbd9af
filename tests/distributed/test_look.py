"""A look runs losses that talk to other ranks, and waits for none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports

WORKER = Path(__file__).with_name("look_worker.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reports(WORKER, 2, tmp_path_factory.mktemp("look"))


@pytest.mark.slow
def test_collectives_are_answered_as_if_all_ranks_had_the_same(report: dict[str, Any]) -> None:
    found = report["answers"]
    assert found["tensors"] == [[2, 6], [1, 3], [1, 3], [1, 3], [1, 3], [1, 3, 1, 3]]
    assert found["objects"] == [{"a": 1}, {"a": 1}]
    assert "the collective reduce_scatter" in found["refused"][0]
    assert "not by a sum, mean, min or max" in found["refused"][1]


@pytest.mark.slow
def test_ranks_whose_looks_differ_do_not_wait_for_each_other(report: dict[str, Any]) -> None:
    assert report["distance"] <= 1e-12


@pytest.mark.slow
def test_a_loss_that_compares_over_ranks_is_refused(report: dict[str, Any]) -> None:
    assert "compare" in report["refused"]
    assert "wb.Coupled" in report["refused"]
