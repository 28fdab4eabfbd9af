"""Every benchmark writes something that a page shows, and every page names one that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
SCRIPTS = [
    path.name
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    and not path.name.endswith("_worker.py")
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_names_it(name: str) -> None:
    assert f"benchmarks/{name}" in TEXT


def test_every_benchmark_that_a_page_names_is_there() -> None:
    named = set(re.findall(r"benchmarks/(\w+\.py)", TEXT))
    assert named <= {path.name for path in (ROOT / "benchmarks").glob("*.py")}
