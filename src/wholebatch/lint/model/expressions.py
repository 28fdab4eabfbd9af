"""Helpers for expressions and assignments: their names, text and values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import TypeGuard

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

# Spellings of "micro-batches per update". Kept strict: a bare "steps" or "freq" means nothing.
ACCUMULATION_NAME = re.compile(
    r"accum|accu_|grad_?acc|\bgas\b|acc_?steps?|acc_(grad|batch|num)|batch_acc|subdivisions?|acc_?iter|iter_?size|update_?freq|micro_?(steps|batches)"
    r"|num_?micro|n_?micro|virtual_?batch|batch_?multiplier|batch_?split|batches?_per_(step|update)"
    r"|steps?_per_update|(update|optimi[sz]e|step)_(every|interval)|backward_passes_per_step|\bacu\b|step_?interval|optim(izer)?_freq",
    re.IGNORECASE,
)


def is_accumulation_name(name: str) -> bool:
    """True if the name alone says that it counts micro-batches per update."""
    return ACCUMULATION_NAME.search(name) is not None


def dotted(node: ast.AST) -> str | None:
    """Return a plain chain of names as text (`self.opt.step`), or None for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(node.id)
    return ".".join(reversed(parts))


def place(node: ast.AST) -> str | None:
    """Return the same as `dotted`, and also `state['step']`: any slot that can hold a counter."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = place(node.value)
        if owner is not None and isinstance(node.slice.value, str):
            return f"{owner}[{node.slice.value!r}]"
    return dotted(node)


def last_part(node: ast.AST) -> str:
    """Return the last name of a chain: `step` for `self.opt.step`, or ""."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def text(node: ast.AST) -> str:
    """Return the expression as normalised source, so that spacing does not matter."""
    return ast.unparse(node)


def number(node: ast.AST | None) -> float | None:
    """Return the value of a numeric literal (also a negative one), else None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return None if isinstance(node.value, bool) else float(node.value)
    return None


def is_binary(node: ast.AST | None, *operators: type[ast.operator]) -> TypeGuard[ast.BinOp]:
    """True for a binary operation with one of these operators."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, operators)


def is_not(node: ast.AST) -> TypeGuard[ast.UnaryOp]:
    """True for `not something`."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def is_call(node: ast.AST | None, *names: str) -> TypeGuard[ast.Call]:
    """True for a call whose last name is one of these: `range(n)`, `np.range(n)`."""
    return isinstance(node, ast.Call) and last_part(node.func) in names


def divisor_of(node: ast.AST) -> ast.expr | None:
    """Return the `b` of `a / b` or `a /= b`, else None."""
    if is_binary(node, ast.Div):
        return node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.value
    return None


def root(expr: ast.expr) -> ast.expr:
    """Return the expression without attributes and subscripts: `f(x)` for `f(x).loss[0]`."""
    while isinstance(expr, (ast.Attribute, ast.Subscript)):
        expr = expr.value
    return expr


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument of a call, or None."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def positional(call: ast.Call, index: int) -> ast.expr | None:
    """Return the positional argument at an index, or None if a `*args` comes before it."""
    for at, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            return None
        if at == index:
            return argument
    return None


# Fields that never hold a node; skipping them halves the time of a walk.
_EMPTY_FIELDS = {
    "ctx", "op", "ops", "id", "attr", "arg", "kind", "type_comment", "name", "asname", "module",
    "level", "conversion", "simple", "is_async", "rest", "kwd_attrs", "str",
}  # fmt: skip
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = dict.fromkeys(
    (ast.Constant, ast.Global, ast.Nonlocal, ast.MatchSingleton), ()
)
_WITH_GAPS = {ast.Dict, ast.arguments}  # `{**a}` has no key, `*, a` no default.


def children(node: ast.AST) -> list[ast.AST]:
    """Return the direct child nodes in source order, without operators."""
    kind = type(node)
    names = _FIELDS.get(kind)
    if names is None:
        names = tuple(f for f in kind._fields if f not in _EMPTY_FIELDS)
        _FIELDS[kind] = names
    found: list[ast.AST] = []
    for name in names:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += value
        elif value is not None:
            found.append(value)
    return [n for n in found if n is not None] if kind in _WITH_GAPS else found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and everything inside it: a faster `ast.walk` without operators."""
    todo = [node]
    while todo:
        current = todo.pop()
        yield current
        todo += children(current)


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield every call of an expression in evaluation order (inner calls first)."""
    if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for child in children(node):
        yield from calls_in(child)
    if isinstance(node, ast.Call):
        yield node


def bind_pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, expression) for an assignment; `a, b = f()` gives `f()[0]` and `f()[1]`."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for element, part in zip(target.elts, _parts(target.elts, value), strict=True):
            yield from bind_pairs(element, part)
        return
    name = place(target.value if isinstance(target, ast.Starred) else target)
    if name is not None:
        yield name, value


def _parts(targets: list[ast.expr], value: ast.expr) -> list[ast.expr]:
    if (
        isinstance(value, (ast.Tuple, ast.List))
        and len(value.elts) == len(targets)
        and not any(isinstance(e, ast.Starred) for e in (*value.elts, *targets))
    ):
        return value.elts
    parts = [ast.Subscript(value, ast.Constant(i), ast.Load()) for i in range(len(targets))]
    return [ast.copy_location(part, value) for part in parts]


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
        elif isinstance(node, ast.Expr) and is_call(node.value, "assign", "assign_add"):
            found.update(_targets(getattr(node.value.func, "value", node.value.func)))
        todo += children(node)
    return found
