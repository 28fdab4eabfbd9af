"""What a rule says about a place in a file."""

from __future__ import annotations

import ast
from dataclasses import dataclass

__all__ = ["Edit", "Finding", "Report"]


@dataclass(frozen=True)
class Edit:
    """One rewrite of a fix, at a node of the file.

    `action` is "delete" (the statement), "before" or "after" (insert a statement beside it),
    or "replace" (the expression; `kind` is its class in libcst, since nested ones start together).
    """

    action: str
    line: int
    column: int
    code: str = ""
    kind: str = ""

    @staticmethod
    def at(action: str, node: ast.AST, code: str = "") -> Edit:
        """An edit at the place of a node of the syntax tree."""
        line = int(getattr(node, "lineno", 1))
        column = int(getattr(node, "col_offset", 0))
        return Edit(action, line, column, code, _KINDS.get(type(node), ""))


_KINDS: dict[type[ast.AST], str] = {ast.Name: "Name", ast.BinOp: "BinaryOperation"}


@dataclass(frozen=True, eq=False)
class Report:
    """A rule's own words: the place in the tree, the message, and how to fix it when certain."""

    node: ast.AST
    message: str
    fix: tuple[Edit, ...] = ()


@dataclass(frozen=True, order=True)
class Finding:
    """One line of output. `cell` is the notebook's cell, counted from 1, or None in a script."""

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
        """`file:line:col`, or `notebook:cell N:line:col`."""
        cell = f"cell {self.cell}:" if self.cell is not None else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"
