"""What a command advises is done as it says, and accepted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import EXACT, Ran

Command = Callable[..., Ran]
Write = Callable[..., Path]


def test_the_lines_to_continue_with(command: Command, recipe: Write) -> None:
    ran = command("train", recipe(EXACT), "--updates", 2, "--out", "run")
    for updates in (4, 8):
        line = ran.out.partition("Continue with: wholebatch ")[2].partition("\n")[0]
        ran = command(*shlex.split(line))
        assert ran.status == 0, ran.err
        assert f"update {updates}/{updates}" in ran.out
    page = ran.out.partition("wholebatch report ")[2].partition("\n")[0]
    assert command("report", *shlex.split(page), "--out", "page.html").status == 0


def test_the_rate_of_a_larger_batch(command: Command, recipe: Write) -> None:
    text = EXACT.replace('"batch_size": 10, "micro_batch": 4', '"batch_size": 3')
    given = ("train", recipe(text), "--updates", 1, "--batch-size", 24)
    ran = command(*given, "--out", "one")
    note = ran.out.partition("note: ")[2].partition("\n")[0]
    assert "8 times the recipe's 3 at the same learning rate" in note
    advised = re.findall(r"--lr-rule sqrt", note)
    ran = command(*given, "--out", "two", *advised[0].split())
    assert ran.status == 0, ran.err
    assert "note: the batch" not in ran.out


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (["--batch-size", "500"], r"pass (--batch-size \d+) or less"),
    ],
)
def test_what_was_meant(command: Command, recipe: Write, wrong: list[str], right: str) -> None:
    path = recipe(EXACT)
    given = ("train", path, "--updates", 1, "--out", "run")
    refused = command(*given, *wrong)
    assert refused.status == 2
    advised = re.search(right, refused.err)
    assert advised is not None, refused.err
    words = advised[1].split()
    if len(words) == 1 and words[0].startswith("--"):
        words = [words[0], wrong[1]]
    elif len(words) == 1:
        words = [wrong[0], words[0]]
    ran = command(*given, *words)
    assert ran.status == 0, ran.err
