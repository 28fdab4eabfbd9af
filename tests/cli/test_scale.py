"""`wholebatch scale` prints the arithmetic with its remainders, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.cli.helpers import Ran

Command = Callable[..., Ran]


def test_the_same_batch_on_one_to_eight_ranks(command: Command) -> None:
    ran = command("scale", "--batch-size", 100, "--micro-batch", 8)
    assert ran.status == 0, ran.err
    lines = [line for line in ran.out.splitlines() if line.split()[:1] != ["ranks"]]
    assert [line.split()[:4] for line in lines if line.split()[0].isdigit()] == [
        ["1", "100", "8", "13"],
        ["2", "100", "8", "7"],
        ["4", "100", "8", "4"],
        ["8", "100", "8", "2"],
    ]
    assert "(8 × 12 + 4) × 1 rank = 100" in lines[0]
    assert "13 or 12" in lines[3]
    assert "(8 × 1 + 5) × 4 ranks + (8 × 1 + 4) × 4 ranks = 100" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        (("--batch-size", 8, "--micro-batch", 3, "--steps", 7), True),
        (("--batch-size", 64, "--micro-batch", 8, "--steps", 4), False),
    ],
)
def test_fewer_steps_than_given_are_told(
    command: Command, options: tuple[object, ...], is_told: bool
) -> None:
    ran = command("scale", *options)
    assert ran.status == 0, ran.err
    assert ("note: --steps 7: rows with fewer steps" in ran.out) == is_told
    assert ("note" in ran.out) == is_told


def test_the_three_rules_for_the_warm_up(command: Command) -> None:
    options = ("--batch-size", 1024, "--micro-batch", 32, "--base-batch", 128, "--warmup", 500)
    found = json.loads(command("scale", *options, "--json").out)["warmup"]
    assert found == {"base": 500, "same_samples": 63, "same_updates": 500, "times_k": 4000}
    said = " ".join(command("scale", *options).out.split())
    assert "63 over the same samples" in said
    assert "500 over the same updates" in said
    assert "4,000, times 8 like the batch" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give two of --batch-size, --micro-batch and --steps"),
        (["--batch-size", 64], "give two of"),
        (["--batch-size", 0, "--steps", 1], "--batch-size 0"),
        (["--batch-size", 64, "--steps", 2, "--ranks", "1,x"], "--ranks 1,x"),
        (["--batch-size", 64, "--steps", 2, "--lr", 0.1], "--lr: also give --base-batch"),
        (["--batch-size", 64, "--steps", 2, "--lr-rule", "sqrt"], "--lr-rule: also give"),
        (
            ["--micro-batch", 8, "--steps", 2, "--lr", 0.1, "--base-batch", 8],
            "the batch differs between the ranks",
        ),
        (
            ["--batch-size", 64, "--micro-batch", 8, "--steps", 4, "--ranks", 1],
            "a batch of 64 in micro-batches of 8 on 1 rank takes 8 steps, not 4",
        ),
    ],
)
def test_what_is_impossible_is_one_line(
    command: Command, options: list[object], message: str
) -> None:
    ran = command("scale", *options)
    assert ran.status == 2
    assert message in ran.err
