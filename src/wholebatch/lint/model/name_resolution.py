"""Resolution of names to their definitions: `accum` becomes `args.gradient_accumulation_steps`.

Names that change from one iteration to the next stay symbols (`i@3`). So a condition such as
`(n + 1) % accum == 0` reads the same for an `n` from `enumerate` and for a manual counter.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from .events import Definition, Env, Loop, Symbol
from .expressions import dotted, is_accumulation_name, number, slot_name, text

_PURE_CALLS = {"int", "float", "max", "min", "len", "bool", "abs", "round", "divmod"}
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp)
_MAX_NODES = 80
_MAX_DEPTH = 40


class Resolver:
    """Rewrites expressions in terms of symbols, literals and outside names."""

    def __init__(self) -> None:
        self.symbols: dict[str, Symbol] = {}
        self._opaque: dict[int, tuple[Definition, str]] = {}
        # What a followed helper returns to each call: (frame of the caller, id of the call).
        self.returns: dict[tuple[int, int], list[Definition]] = {}

    def new_symbol(
        self,
        name: str,
        loops: tuple[Loop, ...],
        kind: str,
        loop: Loop,
        init: tuple[Definition, ...] = (),
    ) -> ast.Name:
        """Return a new name for a value that a loop changes."""
        key = f"{name}@{len(self.symbols)}"
        self.symbols[key] = Symbol(name, loops, kind, loop, init)
        return ast.Name(id=key, ctx=ast.Load())

    def resolve(self, expr: ast.expr, env: Env, depth: int = 0) -> ast.expr:
        """Return the expression with every name followed as far as is certain."""
        if depth > _MAX_DEPTH:
            return expr
        name = dotted(expr)
        if name is not None:
            return self._name(expr, name, env, depth)
        if isinstance(expr, ast.NamedExpr):
            return self._name(expr.target, expr.target.id, env, depth)
        if isinstance(expr, _OPERATIONS):
            return self._operation(expr, env, depth)
        if isinstance(expr, ast.Call):
            return self._call(expr, env, depth)
        if isinstance(expr, ast.Subscript):
            slot = slot_name(expr)
            if slot is not None and slot in env:
                return self._name(expr, slot, env, depth)
            return ast.Subscript(self.resolve(expr.value, env, depth + 1), expr.slice, expr.ctx)
        if isinstance(expr, ast.Attribute):
            return ast.Attribute(self.resolve(expr.value, env, depth + 1), expr.attr, expr.ctx)
        return expr

    def _operation(self, expr: ast.expr, env: Env, depth: int) -> ast.expr:
        """Return the operation with its operands resolved."""
        fields: dict[str, Any] = {}
        for name, value in ast.iter_fields(expr):
            if isinstance(value, ast.expr):
                value = self.resolve(value, env, depth + 1)
            elif isinstance(value, list) and name != "ops":
                value = [self.resolve(item, env, depth + 1) for item in value]
            fields[name] = value
        return type(expr)(**fields)

    def _call(self, expr: ast.Call, env: Env, depth: int) -> ast.expr:
        returned = self._pure_return(expr, env)
        if returned is not None:
            return self.resolve(returned.expr, returned.env, depth + 1)
        is_pure = dotted(expr.func) in _PURE_CALLS
        func = expr.func if is_pure else self.resolve(expr.func, env, depth + 1)
        # `resolve` leaves a starred argument as it is.
        args = [self.resolve(argument, env, depth + 1) for argument in expr.args]
        return ast.Call(func, args, expr.keywords)

    def _name(self, expr: ast.expr, name: str, env: Env, depth: int) -> ast.expr:
        defs = env.get(name)
        if defs is None:
            head, _, rest = name.rpartition(".")
            # `cfg.accum` where only `cfg` is known: resolve that part.
            known = head in env or any(part in env for part in _prefixes(head))
            if head and isinstance(expr, ast.Attribute) and known:
                return ast.Attribute(self.resolve(expr.value, env, depth + 1), rest, ctx=ast.Load())
            return expr
        if is_accumulation_name(name) and all(number(d.expr) == 1 for d in defs):
            return ast.Name(id=name, ctx=ast.Load())  # A setting that is off by default.
        followed = [
            self.resolve(d.expr, d.env, depth + 1)
            for d in defs
            if is_simple(d.expr) or self._pure_return(d.expr, d.env) is not None
        ]
        if len(followed) == len(defs):
            spelled = {text(f) for f in followed}
            if len(spelled) == 1 and sum(1 for _ in ast.walk(followed[0])) <= _MAX_NODES:
                return followed[0]
        loops = max((d.loops for d in defs), key=len)
        if not loops:
            return ast.Name(id=name, ctx=ast.Load())
        return ast.Name(id=self._opaque_key(name, defs, loops), ctx=ast.Load())

    def _pure_return(self, call: ast.expr, env: Env) -> Definition | None:
        """Return the one simple value that a followed helper returns to this call, or None."""
        returned: Sequence[Definition] = self.returns.get((env.frame, id(call)), ())
        return returned[0] if len(returned) == 1 and is_simple(returned[0].expr) else None

    def _opaque_key(self, name: str, defs: tuple[Definition, ...], loops: tuple[Loop, ...]) -> str:
        known = self._opaque.get(id(defs[-1]))
        if known is not None:
            return known[1]
        key = f"{name}@{len(self.symbols)}"
        self.symbols[key] = Symbol(name, loops, "opaque")
        self._opaque[id(defs[-1])] = (defs[-1], key)
        return key

    def symbols_in(self, expr: ast.AST) -> list[Symbol]:
        """Return the symbols in a resolved expression."""
        return [
            self.symbols[node.id]
            for node in ast.walk(expr)
            if isinstance(node, ast.Name) and node.id in self.symbols
        ]

    def varies(self, expr: ast.AST, loop: Loop) -> bool:
        """True if a resolved expression can differ between two iterations of a loop."""
        return any(loop in s.loops or s.loop is loop for s in self.symbols_in(expr))

    def key(self, expr: ast.expr, env: Env) -> str:
        """Return a text that is equal for two spellings of the same number of micro-batches."""
        return text(strip_casts(self.resolve(expr, env)))


def _prefixes(name: str) -> list[str]:
    """Return `a.b.c`, `a.b` and `a` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def is_simple(expr: ast.AST) -> bool:
    """True if an expression can replace the name it was assigned to."""
    if isinstance(expr, ast.Call):
        return _is_simple_call(expr)
    if isinstance(expr, ast.Subscript):
        return is_simple(expr.value) and isinstance(expr.slice, ast.Constant)
    known = (ast.Constant, ast.Name, ast.Attribute, *_OPERATIONS)
    return isinstance(expr, known) and all(
        is_simple(part) for part in ast.iter_child_nodes(expr) if isinstance(part, ast.expr)
    )


def _is_simple_call(call: ast.Call) -> bool:
    if dotted(call.func) in _PURE_CALLS:
        return all(is_simple(a) for a in call.args) and not call.keywords
    if not isinstance(call.func, ast.Attribute) or not is_simple(call.func.value):
        return False
    # A settings dictionary counts as a name.
    if call.func.attr == "get":
        return all(isinstance(a, ast.Constant) for a in call.args)
    # So does a method that computes the number of steps, or a framework's flag.
    return is_accumulation_name(call.func.attr) and all(is_simple(a) for a in call.args)


def strip_casts(expr: ast.expr) -> ast.expr:
    """Remove casts: `int(max(1, k))` and `k` are the same number."""
    while isinstance(expr, ast.Call) and expr.args and not expr.keywords:
        name = dotted(expr.func)
        if name in {"int", "float", "round"} and len(expr.args) == 1:
            expr = expr.args[0]
        elif name == "max" and len(expr.args) == 2:
            plain = [a for a in expr.args if number(a) is None]
            if len(plain) != 1:
                return expr
            expr = plain[0]
        else:
            return expr
    return expr
