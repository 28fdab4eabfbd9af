"""The tables of docs/which-mean.md are what the script writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "which-mean.md").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import which_mean

    return which_mean


def between(name: str) -> list[str]:
    block = re.search(f"<!-- {name}: begin -->\n(.*?)\n<!-- {name}: end -->", PAGE, re.S)
    assert block is not None
    return block.group(1).strip().splitlines()


@pytest.mark.slow
def test_the_table_of_means_is_the_scripts(script: Any) -> None:
    lines = script.means_table()
    assert between("means") == lines  # the script asserts that ours are within 1e-12


def test_every_trainer_keeps_the_promise(script: Any) -> None:
    lines = between("trainers")
    assert len(lines) == len(script.TRAINERS) + 2
    assert all(line.endswith("| < 1e-6 |") for line in lines[2:])
