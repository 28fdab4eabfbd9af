"""A terminal of forty columns: every number is there, nothing is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import EXACT, Ran


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


def test_plan_fits(command: Callable[..., Ran], recipe: Callable[..., Path]) -> None:
    ran = command("plan", recipe(EXACT), "--gpu-memory", "1GiB")
    assert ran.status == 0, ran.err
    assert ran.out.split("used")[0].split()[-2:] == ["micro-batch", "peak"]
    assert "▶ 10" in ran.out
    assert "…" not in ran.out


def test_recipes_are_wrapped(command: Callable[..., Ran]) -> None:
    said = command("recipes").out
    assert {"256", "auto", "80"} <= set(said.split())
    assert "…" not in said
