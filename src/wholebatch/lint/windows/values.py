"""Values in normal form: which loops they change in, and numbers that the text itself shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from math import ceil

from ..normalise import Loop, NormalFile
from ..normalise.events import Symbol
from ..normalise.syntax import is_binary, is_call, keyword, last_part, number, positional, text

# Calls that wrap an iterable without changing its items.
_WRAPPERS = {"tqdm", "trange", "track", "notebook_tqdm", "TQDM", "Progbar", "progress_bar", "iter"}
_MOVES = ("to", "cuda", "float", "long", "contiguous", "view", "reshape", "flatten", "double")
# Functions of torch that make a tensor of the sizes that they are given.
_TENSORS = {"randn", "rand", "zeros", "ones", "empty", "randint", "arange"}
_MAX_FOLLOWED = 8


def symbols_in(expr: ast.AST | None, file: NormalFile) -> list[Symbol]:
    """Return the symbols in an expression."""
    if expr is None:
        return []
    names = [node.id for node in ast.walk(expr) if isinstance(node, ast.Name)]
    return [file.symbols[name] for name in names if name in file.symbols]


def varies(expr: ast.AST | None, loop: Loop, file: NormalFile) -> bool:
    """True if an expression can differ between two iterations of a loop."""
    if expr is None:
        return False
    numbers: frozenset[int] | None = expr.__dict__.get("loop_numbers")
    if numbers is None:
        found = {inner.number for s in symbols_in(expr, file) for inner in s.loops}
        numbers = expr.__dict__["loop_numbers"] = frozenset(found)
    return loop.number in numbers


def leaves(expr: ast.AST | None, file: NormalFile) -> Iterator[ast.AST]:
    """Yield what an expression can be: both branches of a choice, and what a symbol was set to."""
    todo = [file.value(expr)]
    for _ in range(40):
        if not todo:
            return
        part = todo.pop()
        if isinstance(part, ast.IfExp):
            todo += [file.value(part.orelse), file.value(part.body)]
        elif part is not None:
            yield part


def unmoved(expr: ast.expr) -> ast.expr:
    """Return `CrossEntropyLoss(...)` for `CrossEntropyLoss(...).to(device)`."""
    while is_call(expr, *_MOVES) and isinstance(expr.func, ast.Attribute):
        expr = expr.func.value
    return expr


def peel(iterable: ast.AST | None, file: NormalFile) -> ast.AST | None:
    """Return an iterable without progress bars and names: `enumerate(loader)` for `bar`."""
    for _ in range(_MAX_FOLLOWED):
        if isinstance(iterable, ast.IfExp):
            iterable = iterable.body  # `tqdm(loader) if is_main else loader`
        elif isinstance(iterable, ast.Call) and (
            last_part(iterable.func) in _WRAPPERS or "tqdm" in text(iterable.func)
        ):
            inner = positional(iterable, 0) or keyword(iterable, "iterable")
            if inner is None or last_part(iterable.func) == "trange":
                break
            iterable = inner
        else:
            value = file.value(iterable)
            known = isinstance(value, ast.IfExp) or (
                is_call(value, *_WRAPPERS, "enumerate", "range", "zip", "cycle")
                or (isinstance(value, ast.Call) and "tqdm" in text(value.func))
            )
            if value is iterable or not known:
                break
            iterable = value
    return iterable


def iterated(loop: Loop, file: NormalFile) -> ast.AST | None:
    """Return what a loop runs over, without progress bars and `enumerate`."""
    iterable = peel(loop.iterable, file)
    if is_call(iterable, "enumerate") and iterable.args:
        return peel(iterable.args[0], file)
    return iterable


def integer(expr: ast.AST | None, file: NormalFile) -> int | None:
    """Return the whole number that the text shows for an expression, or None."""
    expr = file.value(expr)
    value = number(expr)
    if value is not None:
        return int(value) if value == int(value) else None
    if is_call(expr, "len") and expr.args:
        return length(expr.args[0], file)
    if is_call(expr, "int", "ceil") and len(expr.args) == 1:
        inner = file.value(expr.args[0])
        if is_binary(inner, ast.Div):
            left, right = integer(inner.left, file), integer(inner.right, file)
            if left is not None and right:
                return ceil(left / right) if is_call(expr, "ceil") else left // right
        return integer(inner, file)
    if is_binary(expr, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod):
        left, right = integer(expr.left, file), integer(expr.right, file)
        if left is None or right is None:
            return None
        if isinstance(expr.op, (ast.FloorDiv, ast.Mod)):
            divides = isinstance(expr.op, ast.FloorDiv)
            return None if right == 0 else left // right if divides else left % right
        sign = -1 if isinstance(expr.op, ast.Sub) else 1
        return left * right if isinstance(expr.op, ast.Mult) else left + sign * right
    return None


def length(expr: ast.AST | None, file: NormalFile) -> int | None:
    """Return the number of items that the text shows an iterable to have, or None."""
    expr = file.value(peel(expr, file))
    if isinstance(expr, (ast.List, ast.Tuple)):
        return None if any(isinstance(e, ast.Starred) for e in expr.elts) else len(expr.elts)
    if isinstance(expr, (ast.ListComp, ast.GeneratorExp)):
        plain = len(expr.generators) == 1 and not expr.generators[0].ifs
        return length(expr.generators[0].iter, file) if plain else None
    if is_binary(expr, ast.Mult) and isinstance(expr.left, ast.List):
        times = integer(expr.right, file)
        return None if times is None else len(expr.left.elts) * times
    if not isinstance(expr, ast.Call):
        return None
    name = last_part(expr.func)
    if name == "range":
        ends = [integer(a, file) for a in expr.args]
        known = [e for e in ends if e is not None]
        return (
            len(range(*known)) if known and len(known) == len(ends) and 0 not in known[2:] else None
        )
    if name in {"enumerate", "list", "tuple", "sorted", "reversed"} and expr.args:
        return length(expr.args[0], file)
    if name == "zip" and expr.args:
        lengths = [n for n in (length(a, file) for a in expr.args) if n is not None]
        return min(lengths) if len(lengths) == len(expr.args) else None
    if name == "DataLoader":
        return _batches(expr, file)
    if name == "TensorDataset" and expr.args:
        return _samples(expr.args[0], file)
    if name == "split" and isinstance(expr.func, ast.Attribute) and expr.args:
        samples, size = _samples(expr.func.value, file), integer(expr.args[0], file)
        return ceil(samples / size) if samples is not None and size else None
    return _samples(expr, file)


def _batches(loader: ast.Call, file: NormalFile) -> int | None:
    data = positional(loader, 0) or keyword(loader, "dataset")
    size = positional(loader, 1) or keyword(loader, "batch_size")
    samples = length(data, file)
    number_of = 1 if size is None else integer(size, file)
    sampled = any(keyword(loader, name) is not None for name in ("sampler", "batch_sampler"))
    if samples is None or not number_of or sampled:
        return None
    drops = keyword(loader, "drop_last")
    dropped = isinstance(drops, ast.Constant) and drops.value is True
    if drops is not None and not isinstance(drops, ast.Constant):
        return None
    return samples // number_of if dropped else ceil(samples / number_of)


def _samples(tensor: ast.AST | None, file: NormalFile) -> int | None:
    """Return the first size of a tensor that a function of torch makes: `torch.randn(64, 10)`."""
    made = file.value(tensor)
    if isinstance(made, ast.expr):
        made = unmoved(made)
    if not isinstance(made, ast.Call) or not text(made.func).startswith("torch."):
        return None
    name = last_part(made.func)
    if name not in _TENSORS or not made.args:
        return None
    sizes = keyword(made, "size") or made.args[-1 if name == "randint" else 0]
    if isinstance(sizes, (ast.Tuple, ast.List)):
        return integer(sizes.elts[0], file) if sizes.elts else None
    return integer(sizes, file)
