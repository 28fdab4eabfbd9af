"""The examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules_with_examples() -> list[str]:
    """Found by reading, not importing: a broken module fails its own test, not the collection."""
    tests = []
    for path in sorted(SRC.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(SRC).with_suffix("").parts
            tests.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return tests


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_of(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=OPTIONS)
    assert result.attempted > 0, f"{name}: has '>>>' that doctest did not find in any docstring"
    assert result.failed == 0, f"{name}: {result.failed} of {result.attempted} examples failed"
