"""Ranks that do not train the same parameters are told so before gradients are added up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports
from tests.support import EXACT

WORKER = Path(__file__).with_name("agree_worker.py")
DOORS = ("in_a_loop", "of_the_whole", "counted_before")
SENTENCES = {
    "frozen": "RankError: module.0.weight (16, 5) float64: it is trained on rank 0, and frozen or "
    "in no optimizer on ranks 1, 2.",
    "not_in_the_optimizer": "RankError: module.2.bias (16,) float64: it is trained on ranks 1, 2, "
    "and frozen or in no optimizer on rank 0.",
    "other_order": "RankError: module.0.weight (16, 5) float64: the optimizer of ranks 1, 2 has it "
    "in another place than that of rank 0.",
    "equal_sizes": "RankError: module.0.weight (5, 5) float64: it is trained on ranks 1, 2, and "
    "frozen or in no optimizer on rank 0.",
    "loaded_on_one": "RankError: module.2.bias has other weights on ranks 1, 2 than on rank 0,",
    "beside_the_model": "RankError: parameter 6 has other weights on ranks 1, 2 than on rank 0,",
    "left_out_by_ddp": "UnsupportedError: module.2.weight: DistributedDataParallel is told to",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return reports(WORKER, 3, tmp_path_factory.mktemp("agree"))


@pytest.mark.slow
@pytest.mark.parametrize("case", SENTENCES)
def test_every_rank_is_told_the_parameter_and_the_ranks(case: str, ranks: Any) -> None:
    for rank in ranks:
        for door in DOORS:
            assert rank[f"{case}, {door}"].startswith(SENTENCES[case])


@pytest.mark.slow
def test_what_is_frozen_and_ordered_alike_is_exact(ranks: Any) -> None:
    assert all(rank["exact"] <= EXACT for rank in ranks)


@pytest.mark.slow
def test_other_weights_are_found_after_a_run_was_loaded(ranks: Any) -> None:
    for rank in ranks:
        for sentence in rank["resumed"]:
            assert "module.0.bias has other weights on rank 2 than on ranks 0, 1" in sentence
        assert len(rank["resumed"]) == 1
