"""The comparison's own training runs, for the tests of exact(Trainer)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trainings of one problem by Transformers: undivided, by itself, and with wholebatch."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import compare.transformers as module

    return module


@pytest.fixture
def problem(hosts: Any) -> Any:
    """The problem: its data, model and distance."""
    return sys.modules["compare.problem"]
