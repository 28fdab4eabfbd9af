"""Every rule finds what its bad fixtures mark, and nothing else anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wholebatch.lint import RULES, Settings, lint_paths

_EXPECT = re.compile(r"#\s*expect:\s*(?P<codes>WB\d+(?:\s*,\s*WB\d+)*)")
FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted(FIXTURES.glob("*/*.py"))


def expected(text: str) -> set[tuple[int, str]]:
    """Return the (line, code) pairs that the comments `# expect: WB101, WB109` of a file name."""
    return {
        (number, code.strip())
        for number, line in enumerate(text.split("\n"), start=1)
        for match in _EXPECT.finditer(line)
        for code in match.group("codes").split(",")
    }


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_findings_are_the_marked_ones(file: Path) -> None:
    findings = lint_paths([str(file)], settings=Settings(select=("WB1",)))
    reported = {(f.line, f.code) for f in findings}
    assert reported == expected(file.read_text())


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_every_rule_has_bad_and_good_fixtures(rule) -> None:
    folder = FIXTURES / rule.code
    bad = list(folder.glob("bad_*.py"))
    good = list(folder.glob("good_*.py"))
    assert bad, f"{rule.code} has no bad fixture"
    assert good, f"{rule.code} has no good fixture"
    for file in bad:
        assert rule.code in {code for _, code in expected(file.read_text())}
    for file in good:
        assert expected(file.read_text()) == set()


def test_codes_are_unique_and_in_order() -> None:
    codes = [rule.code for rule in RULES]
    assert codes == sorted(set(codes))
    assert all(re.fullmatch(r"WB1\d\d", code) for code in codes)
    assert len({rule.name for rule in RULES}) == len(RULES)
