"""Every rule has a page in the documentation, with the rule's own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from wholebatch.lint import RULES

DOCS = Path(__file__).parents[2] / "docs" / "lint"


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_page_has_all_parts(rule) -> None:
    page = (DOCS / f"{rule.code}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {rule.code}: {rule.name}\n\n*{rule.level}*\n\n{rule.summary}\n")
    parts = ["## Why is this bad?", "## Known problems", "## Example"]
    places = [page.index(part) for part in (*parts, "## Use instead")]
    assert places == sorted(places)
    assert page.count("```") % 2 == 0


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_index_has_the_rule(rule) -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert (
        f"| [{rule.code}]({rule.code}.md) | {rule.name} | {rule.summary} | {rule.level} |" in index
    )


def test_no_page_without_a_rule() -> None:
    assert {p.stem for p in DOCS.glob("WB*.md")} == {rule.code for rule in RULES}
