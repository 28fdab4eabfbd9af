"""Conditions that end a window: how they count, and where the count starts.

`(i + 1) % k == 0`, `i % k == k - 1`, `not (n % k)`, a counter that is reset to zero,
`accelerator.sync_gradients` and `... or last` all become a `Boundary`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

from .events import Def, Env, Guard, Loop, Symbol
from .expressions import (
    dotted,
    is_accumulation_name,
    keyword,
    last_part,
    number,
    positional,
    text,
    walk,
)
from .name_resolution import Resolver, strip_casts

__all__ = [
    "Boundary",
    "boundary_of",
    "first_value",
    "is_reset",
    "of_guard",
    "peel",
    "says_accumulating",
    "steps_by_one",
]

_LAST_NAME = re.compile(r"last|final|end\b|is_end|len\(|num_batches|total|epoch_steps|nb\b", re.I)


@dataclass(frozen=True, eq=False)
class Boundary:
    """The condition that ends a window.

    `shift` is the number of extra micro-batches in the first window (negative: missing ones),
    modulo the window; None if unknown. `inverse` marks the opposite condition.
    """

    kind: str  # "modulo", "reset", "dynamic", "last", "accelerate", "deepspeed"
    every: ast.expr | None
    expr: ast.expr
    shift: int | None = None
    inverse: bool = False
    tail: bool = False
    spanning: bool = False
    after_first: bool = False
    pure: bool = True
    partial: bool = False  # "boundary and something else": its negation means nothing.

    @property
    def key(self) -> str:
        """Return the number of micro-batches as text."""
        return "" if self.every is None else text(self.every)


def of_guard(guard: Guard, loop: Loop, resolver: Resolver) -> Boundary | None:
    """Return the boundary that a guard represents, as seen from inside it."""
    found = boundary_of(resolver.resolve(guard.expr, guard.env), loop, resolver)
    if found is None:
        return None
    found = replace(found, expr=guard.expr)
    if found.partial and not guard.positive:
        return None
    return found if guard.positive else replace(found, inverse=not found.inverse)


def boundary_of(expr: ast.expr, loop: Loop, resolver: Resolver) -> Boundary | None:
    """Return the boundary in a resolved condition, or None if it is another condition."""
    if isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.Not):
        inner = boundary_of(expr.operand, loop, resolver)
        return None if inner is None else replace(inner, inverse=not inner.inverse)
    if isinstance(expr, ast.BoolOp):
        return _compound(expr, loop, resolver)
    if isinstance(expr, ast.IfExp):
        return _choice(expr, loop, resolver)
    if isinstance(expr, ast.Compare) and len(expr.ops) == 1:
        return _comparison(expr.left, expr.ops[0], expr.comparators[0], expr, loop, resolver)
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Mod):
        return _modulo(expr, 0.0, None, expr, loop, resolver, inverse=True)
    if isinstance(expr, ast.Attribute) and expr.attr == "sync_gradients":
        return Boundary("accelerate", None, expr)
    if last_part(getattr(expr, "func", expr)) == "is_gradient_accumulation_boundary":
        return Boundary("deepspeed", None, expr)
    if isinstance(expr, ast.Call) and dotted(expr.func) == "bool" and expr.args:
        return boundary_of(expr.args[0], loop, resolver)
    return None


def _choice(expr: ast.IfExp, loop: Loop, resolver: Resolver) -> Boundary | None:
    """Return the boundary of `True if i % k == 0 else False`, or the reverse."""
    values = [v.value if isinstance(v, ast.Constant) else None for v in (expr.body, expr.orelse)]
    if values not in ([True, False], [False, True]):
        return None
    inner = boundary_of(expr.test, loop, resolver)
    if inner is None or values[0] is True:
        return inner
    return replace(inner, inverse=not inner.inverse)


def _compound(expr: ast.BoolOp, loop: Loop, resolver: Resolver) -> Boundary | None:
    parts = [(value, boundary_of(value, loop, resolver)) for value in expr.values]
    known = [b for _, b in parts if b is not None]
    others = [v for v, b in parts if b is None]
    if not known:
        return None
    # The modulo is the boundary; "last of the loop" beside it handles the tail.
    known.sort(key=lambda b: b.kind == "last")
    main = known[0]
    ends = any(b.kind == "last" for b in known[1:])
    is_or = isinstance(expr.op, ast.Or)
    # "boundary or last" and its negation "not boundary and not last" both handle the tail.
    if is_or != main.inverse:
        plain = [v for v in others if says_accumulating(v, main.key) is None]
        partial = any(not _is_tail(v, loop, resolver) for v in plain)
        tail = ends or any(_is_tail(v, loop, resolver) for v in others)
        pure = all(not resolver.varies(v, loop) or _is_tail(v, loop, resolver) for v in others)
        return replace(
            main, tail=tail or main.tail, pure=main.pure and pure, partial=partial, expr=expr
        )
    if is_or:
        return None
    if main.inverse:
        # `k > 1 and i % k != 0` is the inside of a window whenever there are windows.
        others = [v for v in others if says_accumulating(v, main.key) is None]
    after_first = any(_excludes_zero(v, resolver) for v in others)
    pure = all(not resolver.varies(v, loop) or _excludes_zero(v, resolver) for v in others)
    plain = [v for v in others if says_accumulating(v, main.key) is None]
    partial = any(not _excludes_zero(v, resolver) for v in plain)
    return replace(
        main, after_first=after_first, pure=main.pure and pure, partial=partial, expr=expr
    )


def _is_tail(expr: ast.expr, loop: Loop, resolver: Resolver) -> bool:
    """True for one particular iteration: `i == max_iters`, `last`, `step + 1 == len(loader)`."""
    if isinstance(expr, ast.Compare) and isinstance(expr.ops[0], ast.Eq):
        sides = (expr.left, expr.comparators[0])
        if any(_linear(side, loop, resolver) is not None for side in sides):
            return True
    return bool(_LAST_NAME.search(text(expr))) and (
        resolver.varies(expr, loop) or bool(re.search(r"last|final|end", text(expr), re.I))
    )


def _excludes_zero(expr: ast.expr, resolver: Resolver) -> bool:
    if isinstance(expr, ast.Name):
        return any(s.kind in {"target", "carried"} for s in resolver.symbols_in(expr))
    return (
        isinstance(expr, ast.Compare)
        and len(expr.ops) == 1
        and isinstance(expr.ops[0], (ast.Gt, ast.NotEq))
        and number(expr.comparators[0]) == 0
        and isinstance(expr.left, ast.Name)
    )


def _comparison(
    left: ast.expr,
    op: ast.cmpop,
    right: ast.expr,
    whole: ast.expr,
    loop: Loop,
    resolver: Resolver,
) -> Boundary | None:
    if isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mod) and number(left) is not None:
        left, right = right, left
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
        inverse = isinstance(op, (ast.NotEq, ast.Gt))
        if isinstance(op, (ast.Eq, ast.Is, ast.NotEq, ast.Gt)):
            return _modulo(left, number(right), right, whole, loop, resolver, inverse=inverse)
        return None
    if isinstance(op, (ast.Eq, ast.GtE, ast.Gt, ast.NotEq, ast.Lt)):
        last = _last(left, op, right, whole, loop, resolver)
        return last or _counted(left, op, right, whole, loop, resolver)
    return None


def _modulo(
    mod: ast.BinOp,
    rest: float | None,
    rest_expr: ast.expr | None,
    whole: ast.expr,
    loop: Loop,
    resolver: Resolver,
    *,
    inverse: bool,
) -> Boundary | None:
    position = _linear(mod.left, loop, resolver)
    every = strip_casts(mod.right)
    if position is None or (resolver.varies(every, loop) and not _accumulates(every)):
        return None
    symbol, offset, spread = position
    size = number(every)
    if size is not None and size <= 1:
        return None
    if rest is None:
        # `i % k == k - 1`: the remainder is -1.
        if rest_expr is None or text(rest_expr) != f"{text(mod.right)} - 1":
            return None
        rest = -1.0
    start, spanning = first_value(symbol, loop, resolver)
    shift: int | None = None
    if start is not None and (symbol.kind == "target" or steps_by_one(symbol, loop, resolver)):
        raw = int(rest) - start - offset + 1
        shift = raw if size is None else (0 if raw % int(size) == 0 else raw)
    return Boundary("modulo", every, whole, shift, inverse, spanning=spanning or spread)


def _last(
    left: ast.expr,
    op: ast.cmpop,
    right: ast.expr,
    whole: ast.expr,
    loop: Loop,
    resolver: Resolver,
) -> Boundary | None:
    # `i == n - 1` or `i + 1 == n`, in a loop over range(n) or over something of length n.
    if not isinstance(op, (ast.Eq, ast.NotEq, ast.GtE, ast.Lt)):
        return None
    for a, b in ((left, right), (right, left)):
        position = _linear(a, loop, resolver)
        if position is None or resolver.varies(b, loop) or position[0].kind != "target":
            continue
        bound = text(b)
        size = _range_size(loop, resolver)
        if size is not None and bound in {f"{size} - 1", size}:
            every = ast.parse(size, mode="eval").body
            return Boundary("last", every, whole, 0, isinstance(op, (ast.NotEq, ast.Lt)))
        if "len(" in bound or _LAST_NAME.search(bound):
            return Boundary("last", None, whole, 0, isinstance(op, (ast.NotEq, ast.Lt)))
    return None


def _range_size(loop: Loop, resolver: Resolver) -> str | None:
    iterable = loop.iterable
    if not isinstance(iterable, ast.Call) or dotted(iterable.func) != "range":
        return None
    return resolver.key(iterable.args[0], loop.entry) if len(iterable.args) == 1 else None


def _counted(
    left: ast.expr,
    op: ast.cmpop,
    right: ast.expr,
    whole: ast.expr,
    loop: Loop,
    resolver: Resolver,
) -> Boundary | None:
    inverse = isinstance(op, (ast.NotEq, ast.Lt))
    every = strip_casts(right)
    position = _linear(left, loop, resolver)
    if position is not None:
        symbol, offset, _ = position
        if symbol.kind != "carried" or resolver.varies(every, loop):
            return None
        if not is_reset(symbol, loop):
            return None
        start, spanning = first_value(symbol, loop, resolver)
        shift = None if start is None else 1 - start - offset + isinstance(op, ast.Gt)
        return Boundary("reset", every, whole, shift, inverse, spanning=spanning)
    if not isinstance(left, ast.BinOp) or not isinstance(left.op, ast.Sub):
        return None
    if not _accumulates(every) or not resolver.varies(left, loop):
        return None
    return Boundary("dynamic", every, whole, None, inverse, spanning=True)


def _accumulates(expr: ast.expr) -> bool:
    return is_accumulation_name(text(expr))


def _linear(expr: ast.expr, loop: Loop, resolver: Resolver) -> tuple[Symbol, int, bool] | None:
    """Return (symbol, constant, True if a loop-invariant term is added) for `i + c + epoch * n`."""
    if isinstance(expr, ast.Name):
        symbol = resolver.symbols.get(expr.id)
        if symbol is None or symbol.kind == "opaque" or symbol.loop is not loop:
            return None
        return symbol, 0, False
    if isinstance(expr, ast.Call) and dotted(expr.func) == "len" and len(expr.args) == 1:
        return _linear_length(expr.args[0], loop)
    if isinstance(expr, ast.Attribute) and loop.virtual:
        return _linear_attribute(expr, loop, resolver)
    if not isinstance(expr, ast.BinOp) or not isinstance(expr.op, (ast.Add, ast.Sub)):
        return None
    left = _linear(expr.left, loop, resolver)
    right = _linear(expr.right, loop, resolver) if isinstance(expr.op, ast.Add) else None
    if (left is None) == (right is None):
        return None
    found, other = (left, expr.right) if left is not None else (right, expr.left)
    assert found is not None
    constant = number(other)
    if constant is not None:
        sign = -1 if isinstance(expr.op, ast.Sub) else 1
        return found[0], found[1] + sign * int(constant), found[2]
    if resolver.varies(other, loop):
        return None
    sign = -1 if isinstance(expr.op, ast.Sub) else 1
    return found[0], found[1] + sign * _constant_part(other), True


def _constant_part(expr: ast.expr) -> int:
    """Return the 1 of `1 + epoch * len(loader)`: the rest is a whole number of epochs."""
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add):
        return _constant_part(expr.left) + _constant_part(expr.right)
    return int(number(expr) or 0)


def _linear_attribute(
    expr: ast.Attribute, loop: Loop, resolver: Resolver
) -> tuple[Symbol, int, bool] | None:
    # `engine.state.iteration` in a step function: a counter kept by other code.
    root: ast.expr = expr
    while isinstance(root, ast.Attribute):
        root = root.value
    if isinstance(root, ast.Name) and root.id.split(".")[0] == "self":
        return Symbol(text(expr), (loop,), "carried", loop), 0, False
    if isinstance(root, ast.Name) and root.id in resolver.symbols:
        owner = resolver.symbols[root.id]
        if owner.loop is loop and owner.kind == "carried":
            return replace(owner, init=()), 0, False
    return None


def says_accumulating(expr: ast.expr, key: str) -> bool | None:
    """True if a condition means "accumulation is on" (`k > 1`), False if "off", else None."""
    if isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.Not):
        inner = says_accumulating(expr.operand, key)
        return None if inner is None else not inner
    if isinstance(expr, ast.Compare) and len(expr.ops) == 1:
        op, limit = expr.ops[0], number(expr.comparators[0])
        if not _names_count(expr.left, key) or limit not in {0.0, 1.0, 2.0}:
            return None
        if (isinstance(op, ast.Gt) and limit <= 1) or (isinstance(op, ast.GtE) and limit == 2):
            return True
        if isinstance(op, ast.NotEq):
            return True
        if isinstance(op, (ast.Eq, ast.LtE)) and limit <= 1:
            return False
        return False if isinstance(op, ast.Lt) else None
    return True if _names_count(expr, key) and not isinstance(expr, ast.Compare) else None


def _names_count(expr: ast.expr, key: str) -> bool:
    spelled = text(strip_casts(expr))
    if spelled == key and key:
        return True
    return (dotted(expr) is not None or isinstance(expr, ast.Subscript)) and is_accumulation_name(
        spelled
    )


def _linear_length(kept: ast.expr, loop: Loop) -> tuple[Symbol, int, bool] | None:
    # `len(losses) % k` after `losses.append(...)`: a list used as a counter.
    name = dotted(kept)
    for node in walk(loop.node):
        if isinstance(node, ast.Attribute) and node.attr == "append" and dotted(node.value) == name:
            return Symbol(name or "", (loop,), "carried", loop), 0, True
    return None


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
