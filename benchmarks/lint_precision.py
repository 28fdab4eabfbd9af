"""Precision and recall of the linter on labelled files.

    python benchmarks/lint_precision.py FOLDER LABELS

LABELS has one line per file: its path under FOLDER, and the rules whose mistake a reader found in
it. A file without a rule is right. The word `plain` marks a file that does not accumulate. Lines
that start with `#` are comments.

    owner/project/train.py WB101 WB109
    owner/other/train.py
    owner/third/evaluate.py plain

A finding is right if the file has the label of its rule, on whatever line. The table ends with the
errors and the notes, each by itself, and with the number of accumulating files that have neither a
finding nor the note that the loop was not understood.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wholebatch.lint import Settings, lint_paths


@dataclass
class Score:
    """Counts of findings by rule."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    levels: Counter[tuple[str, bool]] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    accumulating: int = 0
    silent: list[str] = field(default_factory=list)  # Neither a finding nor the note.

    def row(self, name: str, codes: Iterable[str]) -> str:
        """Return one line of the table: the counts, precision and recall over some rules."""
        right, wrong, missed = (
            sum(counter[code] for code in codes)
            for counter in (self.right, self.wrong, self.missed)
        )
        precision = right / (right + wrong) if right + wrong else 1.0
        recall = right / (right + missed) if right + missed else 1.0
        return f"| {name} | {right} | {wrong} | {missed} | {precision:.2f} | {recall:.2f} |"

    def table(self) -> str:
        """Return the table over all rules, with the differences and silent files below it."""
        codes = sorted({*self.right, *self.wrong, *self.missed})
        lines = [
            "| rule | right | wrong | missed | precision | recall |",
            "|---|---|---|---|---|---|",
        ]
        lines += [self.row(code, [code]) for code in codes]
        lines += [self.row("all", codes), ""]
        for level in ("error", "note"):
            right, wrong = self.levels[level, True], self.levels[level, False]
            precision = right / (right + wrong) if right + wrong else 1.0
            lines.append(f"{level}s: {right} right, {wrong} wrong, precision {precision:.2f}")
        lines += [
            f"accumulating files: {self.accumulating}, "
            f"with neither a finding nor the note: {len(self.silent)}"
        ]
        return "\n".join([*lines, *self.differences, *(f"silent {path}" for path in self.silent)])


def read_labels(text: str) -> dict[str, frozenset[str]]:
    """Return the labels of each path; `WB103:148` counts as `WB103`."""
    lines = [line.split() for line in text.splitlines() if line.strip() and line[0] != "#"]
    return {path: frozenset(label.partition(":")[0] for label in labels) for path, *labels in lines}


def measure(folder: Path, labels: Mapping[str, frozenset[str]]) -> Score:
    """Return the score of the linter on the labelled files of a folder."""
    absent = [path for path in labels if not (folder / path).is_file()]
    if absent:
        raise SystemExit(f"{folder}: has no {absent[0]} ({len(absent)} labelled files are absent)")
    score = Score()
    for path, wanted in labels.items():
        noticed = lint_paths([str(folder / path)], settings=Settings())
        findings = [finding for finding in noticed if finding.code.startswith("WB1")]
        reported = {finding.code for finding in findings}
        expected = wanted - {"plain"}
        # A rule that has an error and a note in one file counts as an error.
        by_code = {f.code: f.level for f in sorted(findings, key=lambda f: f.level, reverse=True)}
        score.levels.update((level, code in expected) for code, level in by_code.items())
        score.right.update(reported & expected)
        for kind, counter, codes in (
            ("wrong", score.wrong, reported - expected),
            ("missed", score.missed, expected - reported),
        ):
            counter.update(codes)
            score.differences += [f"{kind} {code} {path}" for code in sorted(codes)]
        if "plain" not in wanted:
            score.accumulating += 1
            if not noticed:
                score.silent.append(path)
    return score


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a labelled folder."""
    parser = argparse.ArgumentParser(description="Measure the linter on labelled files.")
    parser.add_argument("folder", type=Path, help="folder of the labelled files")
    parser.add_argument("labels", type=Path, help="file of labels: path and rules on each line")
    options = parser.parse_args(argv)
    labels = read_labels(options.labels.read_text(encoding="utf-8"))
    print(measure(options.folder, labels).table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
