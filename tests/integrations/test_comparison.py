"""The table of docs/comparison.md is what the command wrote, and keeps the promise."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wholebatch.errors import MissingExtraError
from wholebatch.optional_packages import require

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs/benchmarks/comparison.json").read_text(encoding="utf-8"))
SPLITS = {"equal", "uneven", "short tail", "masked tokens", "clipped", "two processes"}


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.util.spec_from_file_location("comparison", ROOT / "benchmarks/comparison.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_page_is_the_record(comparison: Any) -> None:
    rows = [
        comparison.Row(**row)
        for name in comparison.LIBRARIES
        for row in RECORD["libraries"].get(name, ())
    ]
    written = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    assert comparison.page(rows, RECORD["date"]) == written


@pytest.mark.parametrize("name", sorted(RECORD["libraries"]))
def test_every_recorded_error_keeps_the_promise(comparison: Any, name: str) -> None:
    for row in RECORD["libraries"][name]:
        assert comparison.Row(**row).keeps, row
    alone = {"two processes"} if name == "keras_torch" else set()  # Keras has none on torch
    found = {row["case"] for row in RECORD["libraries"][name]}
    assert found >= SPLITS - alone


def test_a_row_above_its_limit_is_told(comparison: Any) -> None:
    row = comparison.Row("a library", "equal", None, 1e-13, "float64")
    assert row.keeps
    for ours in (1e-11, float("nan")):
        assert not replace(row, ours=ours).keeps
    assert comparison.said(None) == "none"


def test_a_missing_or_old_library_says_which_versions_work() -> None:
    with pytest.raises(MissingExtraError, match=r"needs nothing-like-it>=1\.2: pip install"):
        require("nothing-like-it", at_least="1.2", extra="jax", purpose="this")
    with pytest.raises(MissingExtraError, match=r"needs torch>=99 \(installed is 2"):
        require("torch", at_least="99", extra="jax", purpose="this")
    assert require("torch", at_least="2.0", extra="jax", purpose="this") >= "2"
