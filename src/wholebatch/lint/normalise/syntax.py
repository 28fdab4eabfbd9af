"""Helpers for expressions: their names, text and values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard, TypeVar

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Node = TypeVar("_Node", bound=ast.AST)

# Spellings of "micro-batches per update". Kept strict: a bare "steps" or "freq" means nothing.
_ACCUMULATION_NAME = re.compile(
    r"accum|accu_|grad_?acc|\bgas\b|acc_?steps?|acc_(grad|batch|num)|batch_acc|subdivisions?"
    r"|acc_?iter|iter_?size|update_?freq|micro_?(steps|batches)|num_?micro|n_?micro|virtual_?batch"
    r"|batch_?multiplier|batch_?split|batches?_per_(step|update)|steps?_per_update"
    r"|(update|optimi[sz]e|step)_(every|interval)|backward_passes_per_step|\bacu\b|step_?interval"
    r"|optim(izer)?_freq",
    re.IGNORECASE,
)
# The mark of a symbol: `i@3` is one value of `i`.
_MARK = re.compile(r"@\d+")
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Pow: "**", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
    ast.And: "and", ast.Or: "or", ast.Not: "not ", ast.USub: "-", ast.UAdd: "+", ast.Invert: "~",
    ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip


def is_accumulation_name(name: str) -> bool:
    """True if the name alone says that it counts micro-batches per update."""
    return _ACCUMULATION_NAME.search(name) is not None


def dotted(node: ast.AST | None) -> str | None:
    """Return a plain chain of names as text (`self.opt.step`), or None for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    if not parts:
        return node.id
    parts.append(node.id)
    return ".".join(reversed(parts))


def last_part(node: ast.AST | None) -> str:
    """Return the last name of a chain without marks: `step` for `self.opt.step`, or ""."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id.partition("@")[0].rpartition(".")[2]
    return ""


def text(node: ast.AST | None) -> str:
    """Return an expression as text that is equal for equal expressions; "" for None."""
    if node is None:
        return ""
    if isinstance(node, ast.Name):
        return node.id
    known: str | None = node.__dict__.get("key_text")
    if known is None:
        # Kept on the node: expressions are compared many times, and nodes never change.
        known = node.__dict__["key_text"] = _text(node)
    return known


def _text(node: ast.AST) -> str:
    """Return the text of the usual expressions; `ast.unparse` is ten times slower."""
    if isinstance(node, ast.Attribute):
        return f"{text(node.value)}.{node.attr}"
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.BinOp):
        return f"({text(node.left)} {_OPERATORS.get(type(node.op), '?')} {text(node.right)})"
    if isinstance(node, ast.UnaryOp):
        return f"({_OPERATORS[type(node.op)]}{text(node.operand)})"
    if isinstance(node, ast.BoolOp):
        return f"({f' {_OPERATORS[type(node.op)]} '.join(map(text, node.values))})"
    if isinstance(node, ast.Compare):
        sides = zip(node.ops, node.comparators, strict=True)
        rest = " ".join(f"{_OPERATORS[type(op)]} {text(side)}" for op, side in sides)
        return f"({text(node.left)} {rest})"
    if isinstance(node, ast.Call):
        options = [f"{k.arg or '**'}={text(k.value)}" for k in node.keywords]
        return f"{text(node.func)}({', '.join([*map(text, node.args), *options])})"
    if isinstance(node, ast.Subscript):
        return f"{text(node.value)}[{text(node.slice)}]"
    return ast.unparse(node)


def shown(node: ast.AST | None) -> str:
    """Return an expression as the user would write it, without marks."""
    return "" if node is None else _MARK.sub("", ast.unparse(node))


def written(node: ast.AST) -> ast.AST:
    """Return the expression of the source that a normal form was made from."""
    source: ast.AST = node.__dict__.get("source", node)
    return source


def changed(node: _Node, **fields: object) -> _Node:
    """Return a copy of a node with other fields, which knows the node of the source."""
    copy = node.__class__.__new__(node.__class__)
    values = copy.__dict__
    values.update(node.__dict__)
    values.pop("key_text", None)
    values.pop("loop_numbers", None)
    values.setdefault("source", node)
    values.update(fields)
    return copy


def names_in(*nodes: ast.AST) -> frozenset[str]:
    """Return the names in code: of variables, attributes, parameters and options; no strings."""
    return names_of(part for node in nodes for part in ast.walk(node))


def names_of(parts: Iterable[ast.AST]) -> frozenset[str]:
    """Return the names that nodes have themselves."""
    fields = ("id", "attr", "arg", "name")
    values = {part.__dict__.get(field) for part in parts for field in fields}
    return frozenset(name for name in values if isinstance(name, str))


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
    """True for a call whose last name is one of these, if any: `range(n)`, `np.range(n)`."""
    return isinstance(node, ast.Call) and (not names or last_part(node.func) in names)


def divisor_of(node: ast.AST | None) -> ast.expr | None:
    """Return the `b` of `a / b` or `a /= b`, else None."""
    if is_binary(node, ast.Div):
        return node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.value
    return None


def keyword(call: ast.AST | None, name: str) -> ast.expr | None:
    """Return the value of a keyword argument of a call, or None."""
    if not isinstance(call, ast.Call):
        return None
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


def strip_casts(expr: ast.expr) -> ast.expr:
    """Remove casts: `int(max(1, k))` and `k` are the same number."""
    while isinstance(expr, ast.Call) and expr.args and not expr.keywords:
        name = dotted(expr.func)
        plain = [a for a in expr.args if number(a) is None]
        if name in {"int", "float", "round"} and len(expr.args) == 1:
            expr = expr.args[0]
        elif name == "max" and len(expr.args) == 2 and len(plain) == 1:
            expr = plain[0]
        else:
            return expr
    return expr


def target_names(target: ast.expr) -> Iterator[str]:
    """Yield the names that an assignment target sets: `a` and `b` for `a, *b`."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from target_names(element)
    elif isinstance(target, ast.Starred):
        yield from target_names(target.value)
    else:
        name = dotted(target)
        if name is not None:
            yield name


def assigned_names(body: Sequence[ast.AST]) -> set[str]:
    """Return every name (also `self.x`) that statements assign, except inside functions."""
    names: set[str] = set()
    todo = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names.update(target_names(target))
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor, ast.NamedExpr)):
            names.update(target_names(node.target))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            names.update(target_names(node.optional_vars))
        # Of expressions, only tests hold assignments that matter: `while batch := next(batches)`.
        is_test = isinstance(node, (ast.If, ast.While, ast.Compare, ast.BoolOp, ast.BinOp))
        parts = ast.iter_child_nodes(node)
        todo += parts if is_test else (p for p in parts if not isinstance(p, ast.expr))
    return names
