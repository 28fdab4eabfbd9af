"""No file crashes the linter, and files that do not train give no finding."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from wholebatch.lint import Settings, lint_paths, lint_source

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# What makes the linter parse a file.
TRAINS = "\n\ndef end():\n    loss.backward()\n    optimizer.step()\n"


def unread(findings: list) -> list:
    return [f for f in findings if "could not be checked" in f.message]


def test_files_of_the_standard_library() -> None:
    files = sorted(STANDARD_LIBRARY.glob("*.py"))
    assert len(files) > 100
    assert lint_paths(map(str, files), settings=Settings()) == []
    for file in files[::12]:  # As if they trained, so that they are parsed and walked.
        text = file.read_text(encoding="utf-8", errors="replace")
        assert not unread(lint_source(text + TRAINS))


def test_files_of_these_tests() -> None:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))[::4]
    assert not unread(lint_paths(map(str, files), settings=Settings()))


@pytest.mark.parametrize(
    "text",
    [
        "lambda: loss.backward()",
        "def f(*, a, **b):\n    return [x async for x in loss.backward()]",
        "match x:\n    case [1, *rest] if loss.backward():\n        pass",
        "try:\n    loss.backward()\nexcept* ValueError:\n    optimizer.step()",
        "while (n := n + 1) % 4:\n    loss.backward()\noptimizer.step()",
        "for self.x[0], (a, *b) in z:\n    loss.backward()\n    optimizer.step()",
        "class A:\n    def f(self):\n        self.f()\n        loss.backward()",
        "x = " + "(" * 80 + "loss.backward()" + ")" * 80,
        "x = " + "+".join(["1"] * 3000) + "\nloss.backward()",
        "\0loss.backward()",
    ],
)
def test_odd_syntax(text: str) -> None:
    assert not unread(lint_source(text))
