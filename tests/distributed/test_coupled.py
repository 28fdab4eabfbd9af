"""Losses of the global batch on DDP ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

WORKER = Path(__file__).with_name("coupled_worker.py")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module", params=[2])
def report(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reports(WORKER, request.param, tmp_path_factory.mktemp("coupled"))


@pytest.mark.parametrize("name", ["clip", "info_nce", "batchnorm", "gathered"])
def test_the_update_is_that_of_the_global_batch(report: dict[str, Any], name: str) -> None:
    assert report[name] <= EXACT


def test_gradients_are_reduced_once_per_window(report: dict[str, Any]) -> None:
    assert report["reductions"] == 1


def test_networks_with_batchnorm_are_exact_over_the_ranks(report: dict[str, Any]) -> None:
    assert len(report["networks"]) >= 5
    assert "resnet-50" in report["networks"]
    assert max(report["networks"].values()) <= EXACT, report["networks"]


def test_low_precision_representations_are_gathered(report: dict[str, Any]) -> None:
    assert 0 <= report["bf16"] <= 0.02


def test_what_ranks_cannot_do_is_said_on_all_of_them(report: dict[str, Any]) -> None:
    local, unequal, sharded = report["refusals"]
    assert "differs between the ranks" in local
    assert "needs the representations of every rank" in unequal
    assert "wb.Coupled on a model of Sharded" in sharded
