"""The table of docs/optimizer-state.md is the one that the benchmark wrote."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_table_is_the_benchmarks() -> None:
    table = (DOCS / "benchmarks" / "gradient_memory.md").read_text(encoding="utf-8").strip()
    assert table in (DOCS / "optimizer-state.md").read_text(encoding="utf-8")
