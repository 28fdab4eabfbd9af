"""Precision and recall, measured on files with comments that say what should be found.

`python benchmarks/lint_precision.py tests/lint/fixtures` compares every finding with the
comments `# expect: WB101, WB109` in the files. `# expect-missed: WB101` marks a mistake that is
known to be missed; it counts against recall. With `--pages docs/lint` it also writes the rules'
pages, and the table of scores into their README.md.

The page of a rule is the Markdown file beside its module, so that `--explain` works wherever the
linter is installed. The documentation holds copies, and a test compares them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wholebatch.lint.check_files import lint_files
from wholebatch.lint.lint_settings import Settings
from wholebatch.lint.rules import RULES
from wholebatch.lint.source_files import collect

BEGIN = "<!-- measured by `python benchmarks/lint_precision.py --pages`: begin -->"
END = "<!-- measured: end -->"
_EXPECT = re.compile(r"#\s*expect(?P<missed>-missed)?:\s*(?P<codes>WB\d+(?:\s*,\s*WB\d+)*)")


@dataclass
class Score:
    """Counts per rule: found correctly, found wrongly, missed."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def precision(self, code: str | None = None) -> float:
        """Return the share of findings that are right; 1 if there are none."""
        right, wrong = _count(self.right, code), _count(self.wrong, code)
        return right / (right + wrong) if right + wrong else 1.0

    def recall(self, code: str | None = None) -> float:
        """Return the share of mistakes that were found; 1 if there are none."""
        right, missed = _count(self.right, code), _count(self.missed, code)
        return right / (right + missed) if right + missed else 1.0

    @property
    def codes(self) -> list[str]:
        """Return every code that was found or should have been."""
        return sorted({*self.right, *self.wrong, *self.missed})


def _count(counter: Counter[str], code: str | None) -> int:
    return counter.total() if code is None else counter[code]


def expected(text: str, *, missed: bool | None = None) -> set[tuple[int, str]]:
    """Return the expected (line, code) pairs of a file; `missed` selects one kind of comment."""
    marks: set[tuple[int, str]] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        for match in _EXPECT.finditer(line):
            if missed is None or missed == bool(match.group("missed")):
                marks |= {(number, c.strip()) for c in match.group("codes").split(",")}
    return marks


def measure(paths: Iterable[str]) -> Score:
    """Return the score over all files under the paths."""
    score = Score()
    files = collect(paths, Settings())
    found: dict[str, set[tuple[int, str]]] = {file: set() for file in files}
    for finding in lint_files(files, Settings()):
        found[finding.path].add((finding.line, finding.code))
    for file in files:
        with open(file, encoding="utf-8") as stream:
            wanted = expected(stream.read())
        for line, code in sorted(found[file] | wanted):
            if (line, code) in found[file] & wanted:
                score.right[code] += 1
            elif (line, code) in found[file]:
                score.wrong[code] += 1
                score.differences.append(f"{file}:{line} {code} found, not expected")
            else:
                score.missed[code] += 1
                score.differences.append(f"{file}:{line} {code} expected, not found")
    return score


def pages() -> dict[str, str]:
    """Return the file name and text of every rule's page."""
    return {f"{rule.code}.md": rule.page for rule in RULES}


def table(score: Score) -> str:
    """Return the table of rules with their scores on the fixtures."""
    lines = [
        "| rule | finds | level | fix | found / wrong / missed | precision | recall |",
        "|---|---|---|---|---|---|---|",
    ]
    for rule in RULES:
        code = rule.code
        counts = f"{score.right[code]} / {score.wrong[code]} / {score.missed[code]}"
        lines.append(
            f"| [{code}]({code}.md) | {rule.summary} | {rule.level} "
            f"| {'yes' if rule.fixable else ''} | {counts} "
            f"| {score.precision(code):.2f} | {score.recall(code):.2f} |"
        )
    total = f"{score.right.total()} / {score.wrong.total()} / {score.missed.total()}"
    lines.append(
        f"| all | | | | {total} | **{score.precision():.2f}** | **{score.recall():.2f}** |"
    )
    return "\n".join(lines)


def write_pages(folder: Path, score: Score) -> None:
    """Write the page of every rule, and the table between the marks of README.md."""
    for name, page in pages().items():
        (folder / name).write_text(page, encoding="utf-8")
    index = folder / "README.md"
    before, _, rest = index.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    index.write_text(f"{before}{BEGIN}\n{table(score)}\n{END}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table per rule and the differences; return 1 below precision 0.9 or recall 0.75."""
    parser = argparse.ArgumentParser(description="Measure the rules on marked files.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="folders of marked files")
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="write the rules' pages here")
    given = parser.parse_args(argv)
    score = measure(given.paths)
    print("rule   right wrong missed precision recall")
    for code in [*score.codes, None]:
        print(
            f"{code or 'all':6} {_count(score.right, code):5} {_count(score.wrong, code):5} "
            f"{_count(score.missed, code):6} {score.precision(code):9.2f} {score.recall(code):6.2f}"
        )
    print("\n".join(score.differences))
    if given.pages is not None:
        write_pages(given.pages, score)
    return 0 if score.precision() >= 0.9 and score.recall() >= 0.75 else 1


if __name__ == "__main__":
    sys.exit(main())
