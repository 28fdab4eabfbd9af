"""What a command advises is done as it says, and accepted."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

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
    again = command("train", "--resume", "--out", "run")
    assert "nothing to do: the run has its 8 updates; give --updates for more" in again.out
    page = ran.out.partition("wholebatch report ")[2].partition("\n")[0]
    assert command("report", *shlex.split(page), "--out", "page.html").status == 0
