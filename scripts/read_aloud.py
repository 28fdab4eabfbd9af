"""Print sentences picked at random, to be explained by somebody who does not know the code.

    python scripts/read_aloud.py                      # three sentences of every page
    python scripts/read_aloud.py --docstrings 150     # first lines of docstrings in src/
    python scripts/read_aloud.py --errors 60          # messages of exceptions in src/
    python scripts/read_aloud.py --seed 7

A sentence that is explained wrongly, or only after a look at the code, is rewritten.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def sentences(page: str) -> list[str]:
    """Return the sentences of a page's prose: no code, no tables, no headings.

    >>> sentences("# Title\\n\\nOne thought stands here. Another one\\nstands there.\\n\\n| a |\\n")
    ['One thought stands here.', 'Another one stands there.']
    """
    prose = re.sub(r"^(```|~~~).*?^\1", "", page, flags=re.DOTALL | re.MULTILINE)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose):
        text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", paragraph.strip())
        if text and text[0] not in "|#!<:":
            found += re.split(r"(?<=[.?!]) (?=[A-Z`*\"])", " ".join(text.split()))
    return [sentence for sentence in found if len(sentence.split()) > 3]


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the first paragraph of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield " ".join(text.split("\n\n")[0].split())


def errors(tree: ast.AST) -> Iterator[str]:
    """Yield the messages of the exceptions that are raised, with their gaps in braces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            message = node.exc.args[0]
            if isinstance(message, ast.JoinedStr | ast.Constant):
                yield ast.unparse(message)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--docstrings", type=int, metavar="N")
    parser.add_argument("--errors", type=int, metavar="N")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    if asked.docstrings or asked.errors:
        read = docstrings if asked.docstrings else errors
        found = [
            f"{path.relative_to(ROOT)}: {text}"
            for path in sorted((ROOT / "src").rglob("*.py"))
            for text in read(ast.parse(path.read_text(encoding="utf-8")))
        ]
        print("\n".join(draw.sample(found, asked.docstrings or asked.errors)))
        return
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        known = sentences(page.read_text(encoding="utf-8"))
        for sentence in draw.sample(known, min(3, len(known))):
            print(f"{page.relative_to(ROOT)}: {sentence}")


if __name__ == "__main__":
    main()
