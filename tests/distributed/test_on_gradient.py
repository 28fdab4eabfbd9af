"""Work on the whole gradient over ranks: the same update, or a refusal on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("on_gradient")
    found = reports(Path(__file__).parent / "on_gradient_worker.py", 2, folder)["ranks"]
    return list(found)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("way", ["stepped", "joined", "left"])
def test_the_update_of_the_undivided_global_batch(engine: str, way: str, ranks: Any) -> None:
    for rank in ranks:
        assert rank[f"{engine} {way}"]["gradients"] <= EXACT
        assert rank[f"{engine} {way}"]["update"] <= EXACT


def test_ranks_that_do_not_do_the_same_are_refused(ranks: Any) -> None:
    for rank in ranks:
        assert "on_gradient= has made gradients of norm" in rank["noise"]
        for what in ("rate", "order"):
            assert "ranks differ in their parameters (names, shapes, order" in rank[what]


def test_a_rank_without_data_is_refused_where_the_step_is_the_users(ranks: Any) -> None:
    for rank in ranks:
        assert "after gradient() the step is made by each rank's own loop" in rank["runs out"]
