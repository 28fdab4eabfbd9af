"""Every rule finds what its bad fixtures mark, and nothing else anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.lint_precision import expected, measure
from wholebatch.lint import RULES, Settings, lint_paths

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted(FIXTURES.glob("*/*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_findings_are_the_marked_ones(file: Path) -> None:
    found = {(f.line, f.code) for f in lint_paths([str(file)], settings=Settings())}
    assert found == expected(file.read_text(), missed=False)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_every_rule_has_bad_and_good_fixtures(rule) -> None:
    folder = FIXTURES / rule.code
    bad = [f for f in folder.glob("bad_*.py") if "missed" not in f.stem]
    good = list(folder.glob("good_*.py"))
    assert len(bad) >= 2, f"{rule.code} has too few bad fixtures"
    assert len(good) >= 2, f"{rule.code} has too few good fixtures"
    for file in bad:
        assert rule.code in {code for _, code in expected(file.read_text())}
    for file in good:
        assert expected(file.read_text()) == set()


def test_codes_are_unique_and_in_order() -> None:
    codes = [rule.code for rule in RULES]
    assert codes == sorted(set(codes))
    assert all(re.fullmatch(r"WB1\d\d", code) for code in codes)
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_rules_that_promise_a_fix_give_one() -> None:
    fixed = {
        finding.code for finding in lint_paths([str(FIXTURES)], settings=Settings()) if finding.fix
    }
    assert fixed == {rule.code for rule in RULES if rule.fixable}


def test_precision_and_recall_over_all_fixtures() -> None:
    score = measure([str(FIXTURES)])
    assert score.right.total() >= 60
    assert score.precision() >= 0.9
    assert score.recall() >= 0.75
    for rule in RULES:
        assert score.precision(rule.code) >= 0.75, rule.code
        assert score.recall(rule.code) >= 0.66, rule.code


def test_known_misses_are_still_missed() -> None:
    """A miss that is found by now should be an ordinary expectation."""
    score = measure([str(FIXTURES)])
    listed = sum(len(expected(f.read_text(), missed=True)) for f in FILES)
    assert score.missed.total() == listed
