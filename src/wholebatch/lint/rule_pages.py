"""Writer of the rule pages and the index table: `python -m wholebatch.lint.rule_pages`.

The page of a rule is the docstring of its module, so that `--explain` works wherever the linter is
installed. The documentation holds copies: this module writes them and a test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .precision_recall import Score, measure
from .rules import RULES

__all__ = ["main", "pages", "table"]

BEGIN = "<!-- measured by `python -m wholebatch.lint.rule_pages`: begin -->"
END = "<!-- measured: end -->"


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


def main(argv: Sequence[str] | None = None) -> int:
    """`pages DOCS FIXTURES`: write the pages, and the table between the marks of README.md."""
    given = list(sys.argv[1:] if argv is None else argv)
    if len(given) != 2:
        print("error: give the folder of the pages and that of the fixtures", file=sys.stderr)
        return 2
    folder = Path(given[0])
    for name, page in pages().items():
        (folder / name).write_text(page, encoding="utf-8")
    index = folder / "README.md"
    before, _, rest = index.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    measured = table(measure([given[1]]))
    index.write_text(f"{before}{BEGIN}\n{measured}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
