"""The documentation holds every rule's page as the rule has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lint_precision import BEGIN, END, main, measure, pages, table
from wholebatch.lint import RULES

DOCS = Path(__file__).parents[2] / "docs" / "lint"
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize("name", sorted(pages()))
def test_page_is_the_rules_own(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == pages()[name]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_page_has_all_parts(rule) -> None:
    parts = ["## What it does", "## Why is this bad?", "## Known problems", "## Example"]
    parts.append("## Use instead")
    places = [rule.page.index(part) for part in parts]
    assert places == sorted(places)
    assert rule.page.count("```") % 2 == 0


def test_no_page_without_a_rule() -> None:
    assert {p.name for p in DOCS.glob("WB*.md")} == set(pages())


def test_table_of_the_index_is_what_is_measured() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    written = index.partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table(measure([str(FIXTURES)]))


def test_pages_are_written(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"a\n{BEGIN}\nformer\n{END}\nb\n")
    assert main([str(FIXTURES / "WB104"), "--pages", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "former" not in text
    assert "| [WB104](WB104.md) |" in text
    assert text.endswith(f"{END}\nb\n")
    assert len(list(tmp_path.glob("WB*.md"))) == len(RULES)
