"""Write the table of checks in docs/laws.md from the docstrings of the checks.

python scripts/laws_table.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from wholebatch.audit.check import Check
from wholebatch.audit.own_loop import CHECKS

PAGE = Path(__file__).parents[1] / "docs/laws.md"
BEGIN = "<!-- checks: written by scripts/laws_table.py -->\n"
END = "<!-- end of checks -->"
PARTS = ("Finds", "Costs", "Raises|Warns", "Cannot see")


def parts_of(law: type[Check]) -> list[str]:
    """Return the title of a check's docstring, and its four paragraphs without their labels.

    The word "Raises" or "Warns" is part of the third.
    """
    title, *paragraphs = inspect.cleandoc(law.__doc__ or "").split("\n\n")
    texts = [title.rstrip(".")]
    for label, paragraph in zip(PARTS, paragraphs, strict=True):
        text = " ".join(paragraph.split())
        match = re.match(rf"({label})\b:?\s*", text)
        if match is None:
            raise ValueError(f"{law.__name__}: a paragraph must begin with {label}: {paragraph!r}")
        texts.append((text if "|" in label else text[match.end() :]).rstrip("."))
    return [text.replace("|", "\\|") for text in texts]


def table(laws: Iterable[type[Check]] = CHECKS) -> str:
    """Return the table of these checks."""
    lines = ["| check | finds | asked in windows | costs | answer | cannot see |", "|---" * 6 + "|"]
    for law in laws:
        title, finds, costs, answer, blind = parts_of(law)
        cells = (f"**{title}**", finds, law.windows, costs, answer, blind)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE}: no place for the table"
    return f"{before}{BEGIN}{table()}{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
