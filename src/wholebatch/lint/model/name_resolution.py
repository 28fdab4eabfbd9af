"""Resolution of names to their definitions: `accum` becomes `args.gradient_accumulation_steps`.

Names that change from one iteration to the next stay symbols (`i@3`). So a condition such as
`(n + 1) % accum == 0` reads the same for an `n` from `enumerate` and for a manual counter.
"""

from __future__ import annotations

import ast

from .events import Def, Env, Loop, Symbol
from .expressions import dotted, is_accumulation_name, last_part, number, place, text, walk

__all__ = ["Resolver", "strip_casts"]

_PURE_CALLS = {"int", "float", "max", "min", "len", "bool", "abs", "round"}
_MAX_NODES = 80
_MAX_DEPTH = 12


class Resolver:
    """Rewrites expressions in terms of symbols, literals and outside names."""

    def __init__(self) -> None:
        self.symbols: dict[str, Symbol] = {}
        self._opaque: dict[int, tuple[Def, str]] = {}
        self.returns: dict[int, list[Def]] = {}

    def new_symbol(
        self, name: str, loops: tuple[Loop, ...], kind: str, loop: Loop, init: tuple[Def, ...] = ()
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
        if isinstance(expr, ast.BinOp):
            return ast.BinOp(
                self.resolve(expr.left, env, depth + 1),
                expr.op,
                self.resolve(expr.right, env, depth + 1),
            )
        if isinstance(expr, ast.UnaryOp):
            return ast.UnaryOp(expr.op, self.resolve(expr.operand, env, depth + 1))
        if isinstance(expr, ast.BoolOp):
            return ast.BoolOp(expr.op, [self.resolve(v, env, depth + 1) for v in expr.values])
        if isinstance(expr, ast.Compare):
            return ast.Compare(
                self.resolve(expr.left, env, depth + 1),
                expr.ops,
                [self.resolve(c, env, depth + 1) for c in expr.comparators],
            )
        if isinstance(expr, ast.IfExp):
            return ast.IfExp(
                self.resolve(expr.test, env, depth + 1),
                self.resolve(expr.body, env, depth + 1),
                self.resolve(expr.orelse, env, depth + 1),
            )
        if isinstance(expr, ast.Call):
            return self._call(expr, env, depth)
        if isinstance(expr, ast.Subscript):
            slot = place(expr)
            if slot is not None and slot in env:
                return self._name(expr, slot, env, depth)
            return ast.Subscript(self.resolve(expr.value, env, depth + 1), expr.slice, expr.ctx)
        if isinstance(expr, ast.Attribute):
            return ast.Attribute(self.resolve(expr.value, env, depth + 1), expr.attr, expr.ctx)
        return expr

    def _call(self, expr: ast.Call, env: Env, depth: int) -> ast.expr:
        returned = self.returns.get(id(expr))
        if returned is not None and len(returned) == 1 and is_simple(returned[0].expr):
            return self.resolve(returned[0].expr, returned[0].env, depth + 1)
        return ast.Call(
            expr.func
            if dotted(expr.func) in _PURE_CALLS
            else self.resolve(expr.func, env, depth + 1),
            [
                a if isinstance(a, ast.Starred) else self.resolve(a, env, depth + 1)
                for a in expr.args
            ],
            expr.keywords,
        )

    def _name(self, expr: ast.expr, name: str, env: Env, depth: int) -> ast.expr:
        defs = env.get(name)
        if defs is None:
            head, _, rest = name.rpartition(".")
            # `cfg.accum` where only `cfg` is known: resolve that part.
            if head and isinstance(expr, ast.Attribute) and _known_prefix(head, env):
                return ast.Attribute(self.resolve(expr.value, env, depth + 1), rest, ctx=ast.Load())
            return expr
        followed = [
            self.resolve(d.expr, d.env, depth + 1)
            for d in defs
            if is_simple(d.expr) or self._is_pure_return(d.expr)
        ]
        if len(followed) == len(defs):
            spelled = {text(f) for f in followed}
            if len(spelled) == 1 and sum(1 for _ in walk(followed[0])) <= _MAX_NODES:
                return followed[0]
        loops = max((d.loops for d in defs), key=len)
        if not loops:
            return ast.Name(id=name, ctx=ast.Load())
        return ast.Name(id=self._opaque_key(name, defs, loops), ctx=ast.Load())

    def _is_pure_return(self, expr: ast.expr) -> bool:
        returned = self.returns.get(id(expr))
        return returned is not None and len(returned) == 1 and is_simple(returned[0].expr)

    def _opaque_key(self, name: str, defs: tuple[Def, ...], loops: tuple[Loop, ...]) -> str:
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
            for node in walk(expr)
            if isinstance(node, ast.Name) and node.id in self.symbols
        ]

    def varies(self, expr: ast.AST, loop: Loop) -> bool:
        """True if a resolved expression can differ between two iterations of a loop."""
        return any(loop in s.loops or s.loop is loop for s in self.symbols_in(expr))

    def key(self, expr: ast.expr, env: Env) -> str:
        """Return a text that is equal for two spellings of the same number of micro-batches."""
        return text(strip_casts(self.resolve(expr, env)))


def _known_prefix(name: str, env: Env) -> bool:
    return any(name == known or name.startswith(known + ".") for known in env)


def is_simple(expr: ast.expr) -> bool:
    """True if an expression can replace the name it was assigned to."""
    if isinstance(expr, (ast.Constant, ast.Name)):
        return True
    if isinstance(expr, ast.Attribute):
        return is_simple(expr.value)
    if isinstance(expr, ast.BinOp):
        return is_simple(expr.left) and is_simple(expr.right)
    if isinstance(expr, ast.UnaryOp):
        return is_simple(expr.operand)
    if isinstance(expr, ast.BoolOp):
        return all(is_simple(v) for v in expr.values)
    if isinstance(expr, ast.IfExp):
        return is_simple(expr.test) and is_simple(expr.body) and is_simple(expr.orelse)
    if isinstance(expr, ast.Compare):
        return is_simple(expr.left) and all(is_simple(c) for c in expr.comparators)
    if isinstance(expr, ast.Subscript):
        return is_simple(expr.value) and isinstance(expr.slice, ast.Constant)
    if isinstance(expr, ast.Call):
        name = dotted(expr.func)
        if name in _PURE_CALLS:
            return all(is_simple(a) for a in expr.args) and not expr.keywords
        # A settings dictionary counts as a name.
        if isinstance(expr.func, ast.Attribute) and is_simple(expr.func.value):
            if last_part(expr.func) == "get":
                return all(isinstance(a, ast.Constant) for a in expr.args)
            # So does a method that computes the number of steps, or a framework's flag.
            return is_accumulation_name(last_part(expr.func)) and all(
                is_simple(a) for a in expr.args
            )
    return False


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
