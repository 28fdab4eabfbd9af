"""Values in normal form: which loops they change in, and what loops run over."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..normalise import Loop, NormalFile
from ..normalise.events import Symbol
from ..normalise.syntax import is_call, keyword, last_part, number, positional, text

# Calls that wrap an iterable without changing its items.
_WRAPPERS = {"tqdm", "track", "Progbar", "progress_bar", "iter"}
_MOVES = ("to", "cuda", "float", "long")
# Functions of torch that make a tensor of the sizes that they are given.
_TENSORS = {"randn", "rand", "zeros", "ones", "randint", "arange"}


def symbols_in(expr: ast.AST | None, file: NormalFile) -> list[Symbol]:
    """Return the symbols in an expression."""
    if expr is None:
        return []
    names = [node.id for node in ast.walk(expr) if isinstance(node, ast.Name)]
    return [file.symbols[name] for name in names if name in file.symbols]


def varies(expr: ast.AST | None, loop: Loop, file: NormalFile) -> bool:
    """True if an expression can differ between two iterations of a loop."""
    return any(loop in symbol.loops for symbol in symbols_in(expr, file))


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


def unmoved(expr: ast.AST | None) -> ast.AST | None:
    """Return `torch.arange(n)` for `torch.arange(n).to(device)`."""
    while is_call(expr, *_MOVES) and isinstance(expr.func, ast.Attribute):
        expr = expr.func.value
    return expr


def peel(iterable: ast.AST | None, file: NormalFile) -> ast.AST | None:
    """Return an iterable without progress bars and names: `enumerate(loader)` for `bar`."""
    for _ in range(8):
        if isinstance(iterable, ast.IfExp):
            iterable = iterable.body  # `tqdm(loader) if is_main else loader`
        elif is_call(iterable) and _is_wrapper(iterable):
            iterable = positional(iterable, 0) or keyword(iterable, "iterable")
        else:
            value = file.value(iterable)
            known = is_call(value, "enumerate", "range", "zip", "cycle") or (
                isinstance(value, ast.IfExp) or (is_call(value) and _is_wrapper(value))
            )
            if value is iterable or not known:
                break
            iterable = value
    return iterable


def _is_wrapper(call: ast.Call) -> bool:
    return last_part(call.func) in _WRAPPERS or "tqdm" in text(call.func)


def iterated(loop: Loop, file: NormalFile) -> ast.AST | None:
    """Return what a loop runs over, without progress bars and `enumerate`."""
    iterable = peel(loop.iterable, file)
    if is_call(iterable, "enumerate") and iterable.args:
        return peel(iterable.args[0], file)
    return iterable


def integer(expr: ast.AST | None, file: NormalFile) -> int | None:
    """Return the whole number that an expression is, or None."""
    value = number(file.value(expr))
    return int(value) if value is not None and value == int(value) else None


def length(expr: ast.AST | None, file: NormalFile) -> int | None:
    """Return the number of items that the text shows an iterable or a tensor to have, or None."""
    expr = unmoved(file.value(peel(expr, file)))
    if isinstance(expr, (ast.List, ast.Tuple)):
        return None if any(isinstance(e, ast.Starred) for e in expr.elts) else len(expr.elts)
    if isinstance(expr, ast.ListComp):
        plain = len(expr.generators) == 1 and not expr.generators[0].ifs
        return length(expr.generators[0].iter, file) if plain else None
    if not is_call(expr) or not (expr.args or expr.keywords):
        return None
    first, name = positional(expr, 0), last_part(expr.func)
    if name in {"enumerate", "list", "zip", "TensorDataset"}:
        return length(first, file)
    if name == "range" and len(expr.args) == 1:
        return integer(first, file)
    if name == "DataLoader":
        return _batches(expr, file)
    if name == "split" and isinstance(expr.func, ast.Attribute):
        return _parts(length(expr.func.value, file), first, file)
    if name in _TENSORS and text(expr.func).startswith("torch."):
        size = keyword(expr, "size") or (expr.args[-1] if name == "randint" else first)
        return integer(size.elts[0] if isinstance(size, ast.Tuple) else size, file)
    return None


def _batches(loader: ast.Call, file: NormalFile) -> int | None:
    options = {k.arg: k.value for k in loader.keywords}
    if {None, "sampler", "batch_sampler", "drop_last"} & options.keys():
        return None
    samples = length(positional(loader, 0) or options.get("dataset"), file)
    return _parts(samples, positional(loader, 1) or options.get("batch_size"), file)


def _parts(items: int | None, size: ast.expr | None, file: NormalFile) -> int | None:
    each = 1 if size is None else integer(size, file)
    return -(-items // each) if items is not None and each else None
