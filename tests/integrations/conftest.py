"""The comparison's own training runs, for the tests of exact(Trainer), and quick JAX programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

# XLA compiles programs for the CPU, which is most of what JAX does here, in half the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"


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
