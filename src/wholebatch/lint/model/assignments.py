"""Assignments: the names that statements change, and the value of each name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from .expressions import children, place

__all__ = ["assigned_names", "bind_pairs"]


def bind_pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, expression) for an assignment; `a, b = f()` gives `f()[0]` and `f()[1]`."""
    if isinstance(target, (ast.Tuple, ast.List)):
        matched = (
            isinstance(value, (ast.Tuple, ast.List))
            and len(value.elts) == len(target.elts)
            and not any(isinstance(e, ast.Starred) for e in (*value.elts, *target.elts))
        )
        for index, element in enumerate(target.elts):
            if matched and isinstance(value, (ast.Tuple, ast.List)):
                yield from bind_pairs(element, value.elts[index])
            else:
                part = ast.Subscript(value, ast.Constant(index), ast.Load())
                yield from bind_pairs(element, ast.copy_location(part, value))
        return
    if isinstance(target, ast.Starred):
        target = target.value
    name = place(target)
    if name is not None:
        yield name, value


def _targets(target: ast.expr) -> Iterator[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _targets(element)
    elif isinstance(target, ast.Starred):
        yield from _targets(target.value)
    else:
        name = place(target)
        if name is not None:
            yield name


def assigned_names(body: Sequence[ast.stmt]) -> set[str]:
    """Return every name (also `self.x`) that the statements change, except inside functions."""
    found: set[str] = set()
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found.update(_targets(target))
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor, ast.NamedExpr)):
            found.update(_targets(node.target))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            found.update(_targets(node.optional_vars))
        todo += children(node)
    return found
