"""Each planted bug is found, with the words that name it; the right trainer passes."""

from __future__ import annotations

from functools import partial

import pytest

from tests.split_invariance.planted_trainer import train
from tests.split_invariance.shared_jobs import SharedJobs
from wholebatch.testing import assert_split_invariant

CAUSES = {
    "mean of means": "by wb.watch, Wrong: mean of means",
    "not divided": "by wb.watch, Wrong: not divided",
    "K": "multiplied by K, the number of micro-batches of a rank",
    "1/K": "multiplied by 1/K, as if divided by the number of micro-batches twice",
    "2^N all": r"multiplied by 2\^\(K-1\), as if doubled between micro-batches",
    "2^N": r"by wb.watch, .* the micro-batches count .* times as much as they must",
    "2^N clipped": r"by wb.watch, .* the micro-batches count .* times as much as they must",
    "K clipped": "multiplied by K, the number of micro-batches",
    "adam": "multiplied by K, the number of micro-batches",
    "clipped each": r"gradients are clipped 8 times for 1 update\(s\)",
    "only the last": "by wb.watch, Wrong: only the last micro-batch",
    "kept cast": "off in hidden.weight",
    "rate": "the gradients agree and the movements do not: the learning rate",
    "steps each": "the optimizer steps 9 times, and 2 times with the first split",
    "moves weights": "by wb.watch, Wrong: weights changed in the window",
}
RANKS = {
    "not reduced": "by wb.watch, Wrong: unsynchronised ranks",
    "last not reduced": "by wb.watch, Wrong: unsynchronised ranks",
    "summed": "multiplied by the number of ranks, as if summed and not averaged",
    "ranks' means": "by wb.watch, Wrong: mean of means",
    "only the last": "by wb.watch, Wrong: a micro-batch left out: train(): number 1, 3 of 4",
}
RIGHT = ("", "right adam", "clipped")


@pytest.mark.parametrize("bug", CAUSES)
def test_a_bug_of_one_process(bug: str) -> None:
    with pytest.raises(AssertionError, match=CAUSES[bug]):
        assert_split_invariant(partial(train, bug=bug))


@pytest.mark.parametrize("bug", RIGHT)
def test_a_right_trainer(bug: str) -> None:
    report = assert_split_invariant(partial(train, bug=bug, updates=3))
    assert max(split.error for split in report.splits) < 1e-5
    assert not report.causes


@pytest.fixture(scope="module")
def on_ranks() -> SharedJobs:
    trains = {bug: partial(train, bug=bug) for bug in ("", *RANKS)}
    return SharedJobs(trains, (8, 2), (1, 2, 3), watches=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("bug", RANKS)
def test_a_bug_of_ranks(bug: str, on_ranks: SharedJobs) -> None:
    report = on_ranks.report(bug, (1, 2))
    assert not report.same
    assert RANKS[bug] in report.causes[0]
    drift = any("the ranks end with other parameters" in cause for cause in report.causes)
    assert drift == (bug in ("not reduced", "last not reduced"))


@pytest.mark.slow
@pytest.mark.distributed
def test_the_right_trainer_on_one_to_three_ranks(on_ranks: SharedJobs) -> None:
    report = on_ranks.report("", (1, 2, 3))
    assert report.same, str(report)
    assert len(report.splits) == 5
