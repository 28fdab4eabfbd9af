"""Precision and recall, measured on files with comments that say what should be found.

`python -m wholebatch.lint.precision_recall tests/lint/fixtures` compares every finding with the
comments `# expect: WB101, WB109` in the files. `# expect-missed: WB101` marks a mistake that is
known to be missed; it counts against recall.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .file_collection import collect, lint_files
from .lint_settings import Settings

__all__ = ["Score", "expected", "main", "measure"]

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


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table per rule and the differences; return 1 below precision 0.9 or recall 0.75."""
    paths = list(sys.argv[1:] if argv is None else argv)
    if not paths:
        print("error: no paths given: name a folder of marked files", file=sys.stderr)
        return 2
    score = measure(paths)
    print("rule   right wrong missed precision recall")
    for code in [*score.codes, None]:
        print(
            f"{code or 'all':6} {_count(score.right, code):5} {_count(score.wrong, code):5} "
            f"{_count(score.missed, code):6} {score.precision(code):9.2f} {score.recall(code):6.2f}"
        )
    print("\n".join(score.differences))
    return 0 if score.precision() >= 0.9 and score.recall() >= 0.75 else 1


if __name__ == "__main__":
    sys.exit(main())
