"""The table of docs/memory.md is the one that the benchmark wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_table_is_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from benchmarks.gradient_memory import page

    found = json.loads((ROOT / "docs/benchmarks/gradient_memory.json").read_text("utf-8"))
    assert page(found).strip() in (ROOT / "docs/memory.md").read_text("utf-8")
