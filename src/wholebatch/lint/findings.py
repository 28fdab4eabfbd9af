"""Findings: what a rule reports about a place in a file."""

from __future__ import annotations

import ast
from dataclasses import dataclass

__all__ = ["Edit", "Finding", "Report"]


@dataclass(frozen=True)
class Edit:
    """One edit of a fix, at a node of the file.

    `action` is "delete" (the statement), "before" or "after" (insert a statement beside it), or
    "replace" (the expression). `kind` is the expression's class in libcst: nested expressions can
    start at the same place.
    """

    action: str
    line: int
    column: int
    code: str = ""
    kind: str = ""

    @staticmethod
    def at(action: str, node: ast.AST, code: str = "") -> Edit:
        """Return an edit at the place of a syntax-tree node."""
        line = int(getattr(node, "lineno", 1))
        column = int(getattr(node, "col_offset", 0))
        return Edit(action, line, column, code, _KINDS.get(type(node), ""))


_KINDS: dict[type[ast.AST], str] = {ast.Name: "Name", ast.BinOp: "BinaryOperation"}


@dataclass(frozen=True, eq=False)
class Report:
    """The output of a rule: the node, the message, and a fix if it is certain."""

    node: ast.AST
    message: str
    fix: tuple[Edit, ...] = ()


@dataclass(frozen=True, order=True)
class Finding:
    """One finding. `cell` is the notebook's cell, counted from 1, or None in a script."""

    path: str
    line: int
    column: int
    code: str
    message: str
    level: str = "warning"
    name: str = ""
    cell: int | None = None
    end_line: int | None = None
    fix: tuple[Edit, ...] = ()

    @property
    def place(self) -> str:
        """Return `file:line:col`, or `notebook:cell N:line:col`."""
        cell = f"cell {self.cell}:" if self.cell is not None else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"
