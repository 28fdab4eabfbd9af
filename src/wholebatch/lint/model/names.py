"""Small questions about expressions: what is it called, what does it say, what is its value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = [
    "ACCUMULATION_NAME",
    "calls_in",
    "children",
    "dotted",
    "is_accumulation_name",
    "keyword",
    "last_part",
    "number",
    "place",
    "positional",
    "text",
    "walk",
]

# How people spell "micro-batches per update". Kept strict: a bare "steps" or "freq" says nothing.
ACCUMULATION_NAME = re.compile(
    r"accum|accu_|grad_?acc|\bgas\b|acc_?steps?|acc_(grad|batch|num)|batch_acc|subdivisions?|acc_?iter|iter_?size|update_?freq|micro_?(steps|batches)"
    r"|num_?micro|n_?micro|virtual_?batch|batch_?multiplier|batch_?split|batches?_per_(step|update)"
    r"|steps?_per_update|(update|optimi[sz]e|step)_(every|interval)|backward_passes_per_step|\bacu\b|step_?interval|optim(izer)?_freq",
    re.IGNORECASE,
)


def is_accumulation_name(name: str) -> bool:
    """Whether a name by itself says that it counts micro-batches per update."""
    return ACCUMULATION_NAME.search(name) is not None


def dotted(node: ast.AST) -> str | None:
    """`self.opt.step` as text when the expression is a plain chain of names, else None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(node.id)
    return ".".join(reversed(parts))


def place(node: ast.AST) -> str | None:
    """Like `dotted`, and also `state['step']`: a slot that a counter can live in."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = dotted(node.value)
        if owner is not None and isinstance(node.slice.value, str):
            return f"{owner}[{node.slice.value!r}]"
    return dotted(node)


def last_part(node: ast.AST) -> str:
    """The last name of a chain: `step` for `self.opt.step`, "" when there is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def text(node: ast.AST) -> str:
    """The expression as normalised source, so that two spellings with other spacing are equal."""
    return ast.unparse(node)


def number(node: ast.AST | None) -> float | None:
    """The value of a numeric literal (also a negative one), else None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return None if isinstance(node.value, bool) else float(node.value)
    return None


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value given to a keyword of a call, or None when it is not given."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def positional(call: ast.Call, index: int) -> ast.expr | None:
    """The positional argument at an index, unless a `*args` before it hides the position."""
    for at, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            return None
        if at == index:
            return argument
    return None


# Fields that never hold an expression or a statement; skipping them halves the time of a walk.
_EMPTY_FIELDS = {"ctx", "op", "ops", "id", "attr", "arg", "kind", "type_comment", "n", "s"}
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes directly inside a node, in the order of the source; without operators."""
    kind = type(node)
    names = _FIELDS.get(kind)
    if names is None:
        names = tuple(f for f in kind._fields if f not in _EMPTY_FIELDS)
        _FIELDS[kind] = names
    found: list[ast.AST] = []
    for name in names:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and everything inside it; like `ast.walk` but without operators, and quicker."""
    todo = [node]
    while todo:
        current = todo.pop()
        yield current
        todo += children(current)


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Every call of an expression, in the order Python evaluates them (inner ones first)."""
    if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for child in children(node):
        yield from calls_in(child)
    if isinstance(node, ast.Call):
        yield node
