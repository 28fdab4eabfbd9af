"""No planted mistake passes unseen, and nothing that is correct raises an alarm."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

import wholebatch as wb
from tests.mistakes import correct, judge, kinds
from tests.mistakes.interfaces import as_loss
from tests.mistakes.loops import LOOPS
from tests.mistakes.planted import MISTAKES, Mistake
from tests.mistakes.task import trajectory

pytestmark = pytest.mark.slow
SEEDS = int(os.environ.get("WHOLEBATCH_MISTAKE_SEEDS", "1"))  # more of them look further
# Each mistake meets the first of its interfaces and every second of the others, which take turns.
PAIRS = [
    (one, interface)
    for number, one in enumerate(MISTAKES)
    for place, interface in enumerate(one.interfaces)
    if SEEDS > 1 or place == 0 or (number + place) % 2
]


def test_the_catalogue() -> None:
    listed = [one for one in MISTAKES if one.listed]
    assert len({one.name for one in MISTAKES}) == len(MISTAKES)
    assert len(listed) >= 10
    assert len(MISTAKES) - len(listed) >= 20
    assert len([one for one in MISTAKES if "WholeBatch" in one.interfaces]) >= 20
    assert len(correct.combinations()) + len(LOOPS) >= 60


@pytest.mark.parametrize(
    "mistake, interface", PAIRS, ids=[f"{m.name}-{interface}" for m, interface in PAIRS]
)
def test_no_mistake_passes_unseen(mistake: Mistake, interface: str) -> None:
    """It is named before or at the first wrong update, or the update is exact."""
    draw = random.Random(f"{mistake.name} {interface}")
    for seed in range(SEEDS):
        kind = draw.choice(judge.kinds_for(mistake, interface))
        found = judge.complaint(mistake, kind, interface, seed)
        assert found is None, found


HARMFUL = [one for one in MISTAKES if {"WholeBatch", "Accumulator"} & set(one.interfaces)]


@pytest.mark.parametrize("mistake", HARMFUL, ids=[one.name for one in HARMFUL])
def test_every_mistake_is_one(mistake: Mistake) -> None:
    """A loop by hand, which checks nothing, makes another update: the catalogue can fail."""
    if mistake.words == "never" or "announced" in mistake.name:
        pytest.skip("wrong only in what the library counts")
    kinds = judge.kinds_for(mistake, "by hand")
    assert any(judge.complaint(mistake, kind, "by hand", seed=1) for kind in kinds)


ONLY_VERIFIED = [
    one for one in MISTAKES if "Lightning" in one.interfaces and "Accumulator" not in one.interfaces
]


@pytest.mark.parametrize("mistake", ONLY_VERIFIED, ids=[one.name for one in ONLY_VERIFIED])
def test_verify_finds_what_a_loop_of_your_own_may_not(mistake: Mistake) -> None:
    kind = judge.kinds_for(mistake, "Accumulator")[0]
    task = mistake.plant(kinds.task(kind, 1).but(steps=3))

    def loss(model: Any, micro: Any) -> Any:
        return as_loss(task.given(model, micro))

    assert not wb.verify(task.model, loss, task.batch, micro_batch=5).same


@pytest.mark.parametrize("name, interface", correct.combinations())
def test_no_false_alarm(name: str, interface: str) -> None:
    task = correct.task(name, 1)
    samples = len(next(iter(task.batch.values())))
    sizes = judge.split(interface, samples, random.Random(f"{name} {interface}"))
    torch.manual_seed(11)
    states = trajectory(correct.task(name, 1))
    outcome = judge.train(task.but(steps=len(sizes)), interface, sizes)
    assert outcome.error is None, outcome.error
    assert not outcome.warned
    assert torch.isfinite(outcome.end).all()
    assert (outcome.end != states[0]).any()
    if not task.random:
        assert judge.off(outcome.end, states, 1) <= task.tolerance


@pytest.mark.parametrize("name", LOOPS)
def test_no_false_alarm_in_a_loop(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LOOPS[name]() <= 1e-12
