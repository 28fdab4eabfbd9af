"""The files around the package agree with it: workflows, metadata, the changelog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import wholebatch as wb

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_are_there(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for job in read(path)["jobs"].values():
        for step in job["steps"]:
            assert "run" in step or re.search(r"@(v\d|release/v1)", step["uses"])
            called = re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
            assert set(called) <= targets


def test_the_version_is_the_same_everywhere() -> None:
    assert read(ROOT / "CITATION.cff")["version"] == wb.__version__
    assert f"## [{wb.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
