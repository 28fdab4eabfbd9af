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
# The mark of a symbol: `i@3` is the value of `i` in one iteration.
_SYMBOL_MARK = re.compile(r"@\d+")


def is_accumulation_name(name: str) -> bool:
    """True if the name alone says that it counts micro-batches per update."""
    return ACCUMULATION_NAME.search(name) is not None


def dotted(node: ast.AST | None) -> str | None:
    """Return a plain chain of names as text (`self.opt.step`), or None for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(node.id)
    return ".".join(reversed(parts))


def slot_name(node: ast.AST) -> str | None:
    """Return the same as `dotted`, and also `state['step']`: any slot that can hold a counter."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = slot_name(node.value)
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


def text(node: ast.AST | None) -> str:
    """Return the expression as normalised source, so that spacing does not matter; "" for None."""
    if node is None:
        return ""
    known: str | None = node.__dict__.get("source_text")
    if known is None:
        # Kept on the node: the same expression is compared many times, and nodes never change.
        known = node.__dict__["source_text"] = ast.unparse(node)
    return known


def without_marks(spelled: str) -> str:
    """Return a resolved expression as the user wrote it: `i` for `i@3`."""
    return _SYMBOL_MARK.sub("", spelled)


def names_in(*nodes: ast.AST) -> frozenset[str]:
    """Return the names in code: of variables, attributes, parameters and options; no strings."""
    fields = ("id", "attr", "arg", "name")
    values = {getattr(n, field, None) for node in nodes for n in ast.walk(node) for field in fields}
    return frozenset(name for name in values if isinstance(name, str))


def has_word(word: str, spelled: str) -> bool:
    """True if a text has a dotted name as a whole: `n` in `n + 1`, not in `run.n`."""
    return re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", spelled) is not None


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


def divisor_of(node: ast.AST | None) -> ast.expr | None:
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


def values_of(call: ast.Call) -> list[ast.expr]:
    """Return everything that a call is handed, by position or by keyword."""
    return [*call.args, *(k.value for k in call.keywords)]


def calls_in(node: ast.AST) -> Iterator[ast.Call | ast.NamedExpr]:
    """Yield the calls and `:=` of an expression in evaluation order (inner ones first)."""
    if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child)
    if isinstance(node, (ast.Call, ast.NamedExpr)):
        yield node


def bind_pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, expression) for an assignment; `a, b = f()` gives `f()[0]` and `f()[1]`."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for element, part in zip(target.elts, _parts(target.elts, value), strict=True):
            yield from bind_pairs(element, part)
        return
    name = slot_name(target.value if isinstance(target, ast.Starred) else target)
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


def target_names(target: ast.expr) -> Iterator[str]:
    """Yield the names that an assignment target sets: `a` and `b` for `a, *b`."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from target_names(element)
    elif isinstance(target, ast.Starred):
        yield from target_names(target.value)
    else:
        name = slot_name(target)
        if name is not None:
            yield name


def assigned_names(body: Sequence[ast.AST]) -> set[str]:
    """Return every name (also `self.x`) that the statements change, except inside functions."""
    names: set[str] = set()
    todo = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names.update(target_names(target))
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor, ast.NamedExpr)):
            names.update(target_names(node.target))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            names.update(target_names(node.optional_vars))
        todo += ast.iter_child_nodes(node)
    return names
