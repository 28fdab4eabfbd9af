"""The rule, and what it reports."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..windows import File

ERROR, NOTE = "error", "note"
"""Levels: wrong whatever the data are, or possible."""


@dataclass(frozen=True, eq=False)
class Report:
    """The output of a rule: the node, the message, and whether it is certain or a note."""

    node: ast.AST
    message: str
    level: str = ERROR


@dataclass(frozen=True)
class Rule:
    """One rule. The docstring of its check says what is wrong, why, and what to write."""

    code: str
    name: str
    level: str  # "error", "note", or "error or note"
    check: Callable[[File], Iterator[Report]]

    @property
    def explanation(self) -> str:
        """Return the docstring of the check."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """Return the first sentence of the explanation."""
        return self.explanation.partition("\n")[0]


def rule(
    code: str, name: str, level: str = ERROR
) -> Callable[[Callable[[File], Iterator[Report]]], Rule]:
    """Make a check into a rule."""
    return lambda check: Rule(code, name, level, check)
