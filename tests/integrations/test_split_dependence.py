"""The tables of docs/split-dependence.md are what the command wrote, and keep the promise."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wholebatch.errors import MissingExtraError
from wholebatch.optional_packages import require

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs/benchmarks/split_dependence.json").read_text(encoding="utf-8"))


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("split_dependence")


def test_the_page_is_the_record(benchmark: Any) -> None:
    libraries = RECORD["libraries"]
    rows = [benchmark.Row(**row) for name in benchmark.LIBRARIES for row in libraries[name]]
    page = (ROOT / "docs/split-dependence.md").read_text(encoding="utf-8")
    assert benchmark.page_of(page, rows, RECORD["date"]) == page
    assert {row.trainer for row in rows} == set(benchmark.ABOUT)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert benchmark.written(readme, "trainers", benchmark.short_table(rows)) == readme


@pytest.mark.parametrize("name", sorted(RECORD["libraries"]))
def test_every_recorded_error_keeps_the_promise(benchmark: Any, name: str) -> None:
    for row in RECORD["libraries"][name]:
        assert benchmark.Row(**row).keeps, row


def test_a_row_above_its_limit_is_told(benchmark: Any) -> None:
    row = benchmark.Row("a library", "1.0", "equal", None, 1e-13)
    assert row.keeps
    for ours in (1e-11, float("nan")):
        assert not replace(row, ours=ours).keeps
    assert benchmark.off_by(None) == ""


def test_a_missing_or_old_library_says_which_versions_work() -> None:
    with pytest.raises(MissingExtraError, match=r"needs nothing-like-it>=1\.2: pip install"):
        require("nothing-like-it", at_least="1.2", extra="jax", purpose="this")
    with pytest.raises(MissingExtraError, match=r"needs torch>=99 \(installed is 2"):
        require("torch", at_least="99", extra="jax", purpose="this")
    assert require("torch", at_least="2.0", extra="jax", purpose="this") >= "2"
