"""The machine that writes plain loops: its oracle and its judges find what they are there for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from tests.programs.frame import shrink
from tests.programs.plain.grammar import draw, is_written, loops, smaller
from tests.programs.plain.judge import contradiction, judge, warm_up
from tests.programs.plain.loop import Loop
from tests.programs.plain.mistakes import MISTAKES
from tests.programs.plain.text import script
from tests.programs.run import in_fork, run_as_main


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


def first_with(mistake: str) -> Loop:
    """Return the first loop of a fixed seed in plain torch with this mistake."""
    places = (draw(Random(f"7 {place}")) for place in range(10_000))
    return next(loop for loop in places if (loop.library, loop.mistake) == ("torch", mistake))


def test_a_seed_draws_one_loop() -> None:
    texts = [*loops(1, 20)]
    assert texts == [*loops(1, 20)]
    assert len({text for text, _ in texts}) == 20


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_wrong_by_the_oracle_and_never_the_same_by_verify(
    mistake: str,
) -> None:
    judged = judge(first_with(mistake))
    assert judged.answers is not None, judged.detail
    assert not judged.answers.is_right, judged.detail
    assert judged.answers.verdict != "same", judged.detail


def test_a_right_loop_is_right_by_all_three() -> None:
    judged = judge(Loop(shape="islice", divide="units", extra=1, missing=1))
    assert judged.answers is not None, judged.detail
    assert judged.answers.is_right
    assert judged.answers.verdict == "same"
    assert not judged.answers.errors
    assert not judged.failure


def test_libraries_are_judged() -> None:
    warm_up(["accelerate"])
    right = Loop(library="accelerate", shape="accumulate", clip="norm")
    wrong = replace(right, mistake="divided twice")
    assert [judge(loop).answers.verdict for loop in (right, wrong)] == ["same", "wrong"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change, failure",
    [
        ({"verdict": "wrong", "causes": ("coupled",)}, "verify: right loop called Wrong (coupled)"),
        ({"errors": ("WB101",)}, "lint: error on a right loop (WB101)"),
        ({"is_right": False}, "grammar: a loop meant to be right is not: "),
    ],
)
def test_a_judge_that_disagrees_is_told_of(change: dict[str, object], failure: str) -> None:
    loop = Loop()
    answers = judge(loop).answers
    assert answers is not None
    assert contradiction(loop, replace(answers, **change)) == failure  # type: ignore[arg-type]


def test_a_failure_is_made_plain() -> None:
    loop = Loop(shape="islice", divide="share", optimizer="adam", clip="norm", rows=4)
    smallest = shrink(loop, smaller, lambda other: other.clip == "norm")
    assert smallest == Loop(clip="norm")


def test_every_text_runs_as_a_script() -> None:
    places = (draw(Random(f"3 {place}")) for place in range(1000))
    for loop in itertools.islice((loop for loop in places if loop.ranks == 1), 5):
        text = script(loop)
        assert "wholebatch" not in text
        assert is_written(loop)
        assert in_fork(lambda text=text: run_as_main(text)) == ""
