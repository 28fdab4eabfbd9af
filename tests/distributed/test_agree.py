"""Ranks that do not train the same parameters are told so before gradients are added up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

WORKER = Path(__file__).with_name("agree_worker.py")
ENTRY_POINTS = ("in_a_loop", "of_the_whole", "counted_before")
OTHER_PARAMETERS = "RankError: ranks differ in their parameters (names, shapes, order, or which are"
OTHER_WEIGHTS = "RankError: the weights differ between ranks, so the models would never be the"
SENTENCES = {
    "frozen": OTHER_PARAMETERS,
    "not_in_the_optimizer": OTHER_PARAMETERS,
    "other_order": OTHER_PARAMETERS,
    "equal_sizes": OTHER_PARAMETERS,
    "loaded_on_one": OTHER_WEIGHTS,
    "beside_the_model": OTHER_WEIGHTS,
    "left_out_by_ddp": "UnsupportedError: module.2.weight: DistributedDataParallel ignores",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return reports(WORKER, 3, tmp_path_factory.mktemp("agree"))


@pytest.mark.slow
@pytest.mark.parametrize("case", SENTENCES)
def test_every_rank_is_told_what_differs(case: str, ranks: Any) -> None:
    for rank in ranks:
        for entry_point in ENTRY_POINTS:
            assert rank[f"{case}, {entry_point}"].startswith(SENTENCES[case])


@pytest.mark.slow
def test_what_is_frozen_and_ordered_alike_is_exact(ranks: Any) -> None:
    assert all(rank["exact"] <= EXACT for rank in ranks)


@pytest.mark.slow
def test_other_weights_are_found_after_a_run_was_loaded(ranks: Any) -> None:
    for rank in ranks:
        for sentence in rank["resumed"]:
            assert sentence.startswith(OTHER_WEIGHTS.removeprefix("RankError: "))
        assert len(rank["resumed"]) == 1
