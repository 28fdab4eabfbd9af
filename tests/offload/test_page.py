"""The tables of docs/gradients.md are those that the benchmarks wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["adam_accumulation", "gradient_memory"])
def test_table_is_the_benchmarks(name: str) -> None:
    table = (DOCS / "benchmarks" / f"{name}.md").read_text(encoding="utf-8").strip()
    assert table in (DOCS / "gradients.md").read_text(encoding="utf-8")
