"""Counters: their value in the first iteration, and their increments."""

from __future__ import annotations

import ast

from .events import Def, Env, Loop, Symbol
from .expressions import dotted, keyword, last_part, number, positional
from .name_resolution import Resolver

__all__ = ["first_value", "is_reset", "peel", "steps_by_one"]

# Calls that wrap an iterable without changing its items.
_WRAPPERS = {"tqdm", "trange", "track", "notebook_tqdm", "TQDM", "Progbar", "progress_bar", "iter"}


def peel(iterable: ast.expr | None, env: Env, depth: int = 0) -> ast.expr | None:
    """Return the iterable without progress bars and aliases: `enumerate(loader)` for `pbar`."""
    while iterable is not None and depth < 8:
        depth += 1
        if isinstance(iterable, ast.Call) and (
            last_part(iterable.func) in _WRAPPERS or "tqdm" in (dotted(iterable.func) or "")
        ):
            inner = positional(iterable, 0) or keyword(iterable, "iterable")
            if inner is None or last_part(iterable.func) == "trange":
                return iterable
            iterable = inner
            continue
        name = dotted(iterable)
        defs = env.get(name, ()) if name else ()
        made = [d for d in defs if isinstance(d.expr, (ast.Call, ast.Name))]
        if not made or dotted(made[-1].expr) == name:
            return iterable
        inner_call = made[-1].expr
        if isinstance(inner_call, ast.Call) and not (
            last_part(inner_call.func) in _WRAPPERS | {"enumerate", "range", "zip", "cycle"}
            or "tqdm" in (dotted(inner_call.func) or "")
        ):
            return iterable
        iterable, env = inner_call, made[-1].env
    return iterable


def first_value(symbol: Symbol, loop: Loop, resolver: Resolver) -> tuple[int | None, bool]:
    """Return the first iteration's value (or None), and True if outer loops do not reset it."""
    if symbol.kind == "target":
        start = _target_start(symbol, loop, resolver)
        # An index with another start continues from an earlier epoch or run.
        return start, start is None and _resumes(loop)
    start, spanning = _carried_start(symbol.init, resolver, 0)
    # An attribute set in the constructor keeps counting from call to call.
    kept = symbol.name.startswith("self.") and any(d.node is None for d in symbol.init)
    return start, spanning or kept or loop.virtual


def _resumes(loop: Loop) -> bool:
    iterable = peel(loop.iterable, loop.entry)
    return (
        isinstance(iterable, ast.Call)
        and last_part(iterable.func) == "enumerate"
        and (len(iterable.args) > 1 or keyword(iterable, "start") is not None)
    )


def _target_start(symbol: Symbol, loop: Loop, resolver: Resolver) -> int | None:
    if loop.virtual:
        # Frameworks count batches from zero (Lightning's batch_idx).
        return 0
    iterable = peel(loop.iterable, loop.entry)
    if not isinstance(iterable, ast.Call):
        return None
    name = last_part(iterable.func)
    if name == "enumerate" and isinstance(loop.target, ast.Tuple):
        if dotted(loop.target.elts[0]) != symbol.name:
            return None
        start = positional(iterable, 1) or keyword(iterable, "start")
        return _integer(start, loop.entry, resolver) if start is not None else 0
    if name in {"range", "trange"}:
        if len(iterable.args) == 1:
            return 0
        return _integer(iterable.args[0], loop.entry, resolver) if iterable.args else None
    return None


def _integer(expr: ast.expr, env: Env, resolver: Resolver) -> int | None:
    resolved = resolver.resolve(expr, env)
    value = number(resolved)
    if value is None and isinstance(resolved, ast.BinOp) and isinstance(resolved.op, ast.Add):
        # `start=resumed + 1`: a fresh run resumes from zero.
        value = number(resolved.right)
    return None if value is None else int(value)


def _carried_start(
    init: tuple[Def, ...], resolver: Resolver, depth: int
) -> tuple[int | None, bool]:
    if len(init) != 1 or depth > 6:
        return None, True
    resolved = resolver.resolve(init[0].expr, init[0].env)
    value = number(resolved)
    if value is not None:
        return int(value), False
    if isinstance(resolved, ast.Name) and resolved.id in resolver.symbols:
        outer = resolver.symbols[resolved.id]
        if outer.kind == "carried":
            return _carried_start(outer.init, resolver, depth + 1)[0], True
    return None, True


def steps_by_one(symbol: Symbol, loop: Loop, resolver: Resolver) -> bool:
    """True if every iteration adds one to a manual counter, or resets it to a literal."""
    counted = False
    for definition in loop.exit.get(symbol.name, ()):
        if isinstance(definition.expr, ast.Constant):
            continue
        resolved = resolver.resolve(definition.expr, definition.env)
        counted = (
            isinstance(resolved, ast.BinOp)
            and isinstance(resolved.op, ast.Add)
            and number(resolved.right) == 1
            and isinstance(resolved.left, ast.Name)
            and resolver.symbols.get(resolved.left.id) is symbol
        )
        if not counted:
            return False
    return counted


def is_reset(symbol: Symbol, loop: Loop) -> bool:
    """True if the loop resets a counter to a literal on some path."""
    return any(isinstance(d.expr, ast.Constant) for d in loop.exit.get(symbol.name, ()))
