"""Precision and recall on public training loops that were labelled before the linter read them.

`python benchmarks/lint_public.py FOLDER` compares the findings, by file and rule, with the labels
in lint_labels.txt. FOLDER holds a checkout of each repository as owner/name at the commit of the
labels; none of their code is kept here. The repositories are split by a hash of their names: rules
were changed with one half at hand, and the other half was measured once, at the end; what it taught
was then measured on new sets, one after the other. `--page FILE` writes the table into a page.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wholebatch.lint.check_files import lint_files
from wholebatch.lint.lint_settings import Settings

LABELS = Path(__file__).with_name("lint_labels.txt")
HALVES = ("tuned on", "put aside")
# Later sets, each labelled and measured after the ones before it had taught the rules.
_SET = re.compile(r'the set "(\w+)"\.$')


@dataclass(frozen=True)
class Labelled:
    """One file that was read, and the rules whose mistake it makes."""

    repository: str
    path: str
    first: frozenset[str]
    second: frozenset[str]  # After a second look at each difference: +WB101 and -WB101.
    part: str


def half_of(repository: str) -> str:
    """Return the half of the set that a repository is in, by a hash of its name."""
    return HALVES[int(hashlib.sha256(repository.encode()).hexdigest(), 16) % 2]


def labelled() -> Iterator[Labelled]:
    """Yield every labelled file."""
    later = ""
    for line in LABELS.read_text(encoding="utf-8").splitlines():
        named = _SET.search(line)
        later = named.group(1) if named else later
        if line and not line.startswith("#"):
            repository, _, path, *codes = re.sub(r":\d+", "", line).split()  # WB103:148
            added = {c[1:] for c in codes if c.startswith("+")}
            removed = {c[1:] for c in codes if c.startswith("-")}
            first = {c for c in codes if c.startswith("WB")} | removed
            second = frozenset(first - removed | added)
            part = later or half_of(repository)
            yield Labelled(repository, path, frozenset(first), second, part)


def findings(files: Sequence[Labelled], folder: Path) -> dict[Labelled, set[str]]:
    """Return the rules that report something in each file."""
    places = {str(folder / f.repository / f.path): f for f in files}
    found: dict[Labelled, set[str]] = {f: set() for f in files}
    for finding in lint_files(list(places), Settings()):
        if "could not be checked" in finding.message:
            raise SystemExit(f"{finding.path}: {finding.message}")
        if finding.code.startswith("WB1"):
            found[places[finding.path]].add(finding.code)
    return found


def compare(found: dict[Labelled, set[str]], *, second: bool) -> tuple[Counter[str], list[str]]:
    """Return how many labels were found, missed and wrongly reported, and each difference."""
    counts: Counter[str] = Counter(files=len(found))
    differences = []
    for file, codes in found.items():
        labels = file.second if second else file.first
        counts["right"] += len(codes & labels)
        for kind, extra in (("missed", labels - codes), ("wrong", codes - labels)):
            counts[kind] += len(extra)
            differences += [
                f"{kind} {code} {file.repository} {file.path}" for code in sorted(extra)
            ]
    return counts, differences


def row(half: str, counts: Counter[str]) -> str:
    """Return one line of the table."""
    right, wrong, missed = counts["right"], counts["wrong"], counts["missed"]
    precision, recall = right / max(right + wrong, 1), right / max(right + missed, 1)
    return (
        f"| {half} | {counts['files']} | {right} / {wrong} / {missed} "
        f"| {precision:.2f} | {recall:.2f} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the differences and the table; `--page` also writes the table into a page."""
    parser = argparse.ArgumentParser(description="Measure the rules on labelled public loops.")
    parser.add_argument("folder", type=Path, help="checkouts of the repositories, as owner/name")
    parser.add_argument("--set", action="append", help="measure only this set, such as A")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table between marks")
    given = parser.parse_args(argv)
    lines = [
        "| half | files | right / wrong / missed | precision | recall |",
        "|---|---|---|---|---|",
    ]
    parts = dict.fromkeys(f.part for f in labelled())
    for half in given.set or [*sorted(parts, key=lambda p: p not in HALVES)]:
        found = findings([f for f in labelled() if f.part == half], given.folder)
        counts, differences = compare(found, second=False)
        lines.append(row(half, counts))
        print("\n".join(differences))
        counts, _ = compare(found, second=True)
        lines.append(row(f"{half}, after a second look at each difference", counts))
    print("\n".join(lines))
    if given.page is not None:
        before, _, rest = given.page.read_text(encoding="utf-8").partition(BEGIN)
        text = f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}"
        given.page.write_text(text, encoding="utf-8")
    return 0


BEGIN = "<!-- measured by `python benchmarks/lint_public.py`: begin -->"
END = "<!-- measured: end -->"

if __name__ == "__main__":
    sys.exit(main())
