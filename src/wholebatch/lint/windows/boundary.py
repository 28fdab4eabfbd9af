"""Conditions that end a window: how they count, and where the count starts.

`(i + 1) % k == 0`, `i % k == k - 1`, `not (n % k)`, a counter that is reset to zero,
`accelerator.sync_gradients` and `... or last` all become a `Boundary`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ..normalise import Condition, Loop, NormalFile
from ..normalise.events import Symbol
from ..normalise.syntax import (
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    is_not,
    keyword,
    number,
    positional,
    shown,
    strip_casts,
    text,
    written,
)
from .loss_terms import says_accumulating
from .values import integer, leaves, peel, symbols_in, varies

_LAST_NAME = re.compile(r"last|final|end\b|is_end|len\(|num_batches|total|epoch_steps|nb\b", re.I)


@dataclass(frozen=True, eq=False)
class Boundary:
    """The condition that ends a window.

    `shift` is the number of extra micro-batches in the first window (negative: missing ones),
    modulo the window; None if unknown. `inverse` marks the opposite condition.
    """

    kind: str  # "modulo", "reset", "accelerate"
    every: ast.expr | None
    test: ast.expr
    shift: int | None = None
    inverse: bool = False
    tail: bool = False
    spanning: bool = False  # The count goes on over the epochs.
    after_first: bool = False
    partial: bool = False  # "boundary and something else": its negation means nothing.

    @property
    def key(self) -> str:
        """Return the number of micro-batches as text."""
        return text(self.every)

    @cached_property
    def written(self) -> str:
        """Return the number of micro-batches as the source has it, or ""."""
        parts = ast.walk(written(self.test))
        counts = [n.right for n in parts if is_binary(n, ast.Mod) and dotted(n.right)]
        return shown(written(counts[0])) if counts else shown(self.every)


@dataclass(frozen=True, eq=False)
class _Position:
    """A counter plus a constant; `spans_epochs` says that a loop-invariant term is added too."""

    symbol: Symbol
    offset: int = 0
    spans_epochs: bool = False


def boundary_of(condition: Condition, loop: Loop, file: NormalFile) -> Boundary | None:
    """Return the boundary that a condition stands for, as seen from inside it."""
    boundary = _Conditions(loop, file).read(condition.test)
    if boundary is None or (boundary.partial and not condition.positive):
        return None
    boundary = replace(boundary, test=condition.test)
    return boundary if condition.positive else _negated(boundary)


def _negated(boundary: Boundary | None) -> Boundary | None:
    return None if boundary is None else replace(boundary, inverse=not boundary.inverse)


@dataclass(eq=False)
class _Conditions:
    """Reads the conditions of one loop."""

    loop: Loop
    file: NormalFile

    def read(self, expr: ast.expr) -> Boundary | None:
        """Return the boundary in a condition, or None if it is another condition."""
        if is_not(expr):
            return _negated(self.read(expr.operand))
        if isinstance(expr, ast.BoolOp):
            return self._compound(expr)
        if isinstance(expr, ast.Compare) and len(expr.ops) == 1:
            return self._comparison(expr)
        if is_binary(expr, ast.Mod):
            return self._modulo(expr, 0.0, expr, inverse=True)
        if is_call(expr, "bool") and expr.args:
            return self.read(expr.args[0])
        if isinstance(expr, ast.Attribute) and expr.attr == "sync_gradients":
            return Boundary("accelerate", None, expr)
        return None

    def _varies(self, expr: ast.AST) -> bool:
        return varies(expr, self.loop, self.file)

    def _compound(self, expr: ast.BoolOp) -> Boundary | None:
        parts = [(value, self.read(value)) for value in expr.values]
        main = next((boundary for _, boundary in parts if boundary is not None), None)
        others = [value for value, boundary in parts if boundary is None]
        if main is None:
            return None
        is_or = isinstance(expr.op, ast.Or)
        # "boundary or last" and its negation "not boundary and not last" both handle the tail.
        if is_or != main.inverse:
            tail = main.tail or any(map(self._is_tail, others))
            return replace(self._beside(main, others, self._is_tail), tail=tail)
        if is_or:
            return None
        after_first = any(map(self._excludes_zero, others))
        return replace(self._beside(main, others, self._excludes_zero), after_first=after_first)

    def _beside(
        self, main: Boundary, others: list[ast.expr], harmless: Callable[[ast.expr], bool]
    ) -> Boundary:
        """Return the boundary, marked as partial by the other conditions beside it."""
        plain = [v for v in others if says_accumulating(v, main.key) is None]
        return replace(main, partial=main.partial or any(not harmless(v) for v in plain))

    def _is_tail(self, expr: ast.expr) -> bool:
        """True for one particular iteration: `i == max_iters`, `step + 1 == len(loader)`."""
        if isinstance(expr, ast.Compare) and isinstance(expr.ops[0], (ast.Eq, ast.GtE, ast.Gt)):
            left, right = expr.left, expr.comparators[0]
            is_equal = isinstance(expr.ops[0], ast.Eq)
            if self._position(left) is not None and not self._varies(right):
                return is_equal or number(right) is None
            if is_equal and self._position(right) is not None:
                return True
        return _LAST_NAME.search(text(expr)) is not None

    def _excludes_zero(self, expr: ast.expr) -> bool:
        if isinstance(expr, ast.Name):
            return any(s.kind in {"target", "carried"} for s in symbols_in(expr, self.file))
        return (
            isinstance(expr, ast.Compare)
            and isinstance(expr.ops[0], (ast.Gt, ast.NotEq))
            and number(expr.comparators[0]) == 0
            and isinstance(expr.left, ast.Name)
        )

    # -- comparisons -------------------------------------------------------------------------

    def _comparison(self, expr: ast.Compare) -> Boundary | None:
        left, op, right = expr.left, expr.ops[0], expr.comparators[0]
        if not is_binary(left, ast.Mod):
            counts = isinstance(op, (ast.Eq, ast.GtE, ast.Gt, ast.NotEq, ast.Lt))
            return self._counted(expr) if counts else None
        rest = number(right)
        if is_binary(right, ast.Sub) and number(right.right) == 1:
            rest = -1.0 if text(right.left) == text(left.right) else None  # `i % k == k - 1`
        if rest is None or not isinstance(op, (ast.Eq, ast.Is, ast.NotEq, ast.Gt)):
            return None
        return self._modulo(left, rest, expr, inverse=isinstance(op, (ast.NotEq, ast.Gt)))

    def _modulo(
        self, mod: ast.BinOp, rest: float, whole: ast.expr, *, inverse: bool
    ) -> Boundary | None:
        position, every = self._position(mod.left), strip_casts(mod.right)
        size = number(every)
        if position is None or (size is not None and size <= 1):
            return None
        # A number of steps that the loop changes is a name; a value of the micro-batch is none.
        changing = self.file.symbols.get(getattr(every, "id", ""))
        kept = changing is not None and changing.kind == "carried"
        if self._varies(every) and not kept and not is_accumulation_name(text(every)):
            return None
        symbol = position.symbol
        start, spanning = self._first_value(symbol)
        shift: int | None = None
        if start is not None and (symbol.kind == "target" or self._steps_by_one(symbol)):
            shift = int(rest) - start - position.offset + 1
            if size is not None and shift % int(size) == 0:
                shift = 0
        spanning = spanning or position.spans_epochs
        return Boundary("modulo", every, whole, shift, inverse, spanning=spanning)

    def _counted(self, expr: ast.Compare) -> Boundary | None:
        """Return `n == k` for a counter that is reset."""
        op, every, early = expr.ops[0], strip_casts(expr.comparators[0]), 0
        position = self._position(expr.left)
        if is_binary(every, ast.Sub) and number(every.right) is not None:  # `n == k - 1`
            early, every = _constant_part(every.right), every.left
        if position is None or position.spans_epochs or position.symbol.kind != "carried":
            return None
        symbol = position.symbol
        fixed = not self._varies(every) or is_accumulation_name(text(every))
        is_reset = any(isinstance(value, ast.Constant) for value in self._next(symbol))
        if not (fixed and is_reset and self._steps_by_one(symbol)):
            return None
        start, spanning = self._first_value(symbol)
        first = position.offset + early - isinstance(op, ast.Gt)
        shift = None if start is None else 1 - start - first
        inverse = isinstance(op, (ast.NotEq, ast.Lt))
        return Boundary("reset", every, expr, shift, inverse, spanning=spanning)

    # -- counters ----------------------------------------------------------------------------

    def _position(self, expr: ast.expr) -> _Position | None:
        """Return the counter and the constant of `i + c + epoch * n`, or None."""
        expr = strip_casts(expr)
        if isinstance(expr, ast.Name):
            symbol = self.file.symbols.get(expr.id)
            if symbol is None or symbol.kind == "set" or symbol.loop is not self.loop:
                return None
            return _Position(symbol)
        if not is_binary(expr, ast.Add, ast.Sub):
            return None
        sign = -1 if isinstance(expr.op, ast.Sub) else 1
        left = self._position(expr.left)
        right = self._position(expr.right) if sign == 1 else None
        counter, other = (left, expr.right) if left is not None else (right, expr.left)
        if counter is None or (left is not None and right is not None):
            return None
        is_constant = number(other) is not None
        if not is_constant and self._varies(other):
            return None
        offset = counter.offset + sign * _constant_part(other)
        return _Position(counter.symbol, offset, counter.spans_epochs or not is_constant)

    def _first_value(self, symbol: Symbol) -> tuple[int | None, bool]:
        """Return the first iteration's value (or None), and True if outer loops do not reset it."""
        if symbol.kind == "target":
            start = self._target_start(symbol)
            # An index with another start continues from an earlier epoch or run.
            over = peel(self.loop.iterable, self.file)
            resumes = is_call(over, "enumerate") and len(over.args) + len(over.keywords) > 1
            return start, start is None and resumes
        start, spanning = self._carried_start(symbol.value)
        # An attribute set in the constructor keeps counting from call to call.
        kept = symbol.name.startswith("self.") and not self.loop.parents
        return start, spanning or kept or self.loop.virtual

    def _target_start(self, symbol: Symbol) -> int | None:
        if self.loop.virtual:
            return 0  # Frameworks count batches from zero (Lightning's batch_idx).
        over = peel(self.loop.iterable, self.file)
        if is_call(over, "enumerate") and isinstance(self.loop.target, ast.Tuple):
            if dotted(self.loop.target.elts[0]) != symbol.name:
                return None
            start = positional(over, 1) or keyword(over, "start")
            return integer(start, self.file) if start is not None else 0
        if is_call(over, "range", "trange") and over.args:
            return integer(over.args[0], self.file) if len(over.args) > 1 else 0
        return None

    def _carried_start(self, before: ast.AST | None, depth: int = 0) -> tuple[int | None, bool]:
        """Return the value before the loop, and True if a loop around it carries it on."""
        value = number(before)
        if value is not None:
            return int(value), False
        outer = self.file.symbols.get(getattr(before, "id", ""))
        if outer is not None and outer.kind == "carried" and depth < 6:
            return self._carried_start(outer.value, depth + 1)[0], True
        return None, True

    def _steps_by_one(self, symbol: Symbol) -> bool:
        """True if every iteration adds one to a manual counter, or resets it to a literal."""
        values = [v for v in self._next(symbol) if number(v) is None]
        # On some path it may stay as it is: `if not last: n += 1`.
        steps = [v.left if is_binary(v, ast.Add) and number(v.right) == 1 else v for v in values]
        counts = [self.file.symbols.get(getattr(s, "id", "")) is symbol for s in steps]
        return all(counts) and any(isinstance(v, ast.BinOp) for v in values)

    def _next(self, symbol: Symbol) -> list[ast.AST]:
        """Return what a counter can be at the end of an iteration."""
        return list(leaves(self.loop.after.get(symbol.name), self.file))


def _constant_part(expr: ast.expr) -> int:
    """Return the 1 of `1 + epoch * len(loader)`: the rest is a whole number of epochs."""
    if is_binary(expr, ast.Add):
        return _constant_part(expr.left) + _constant_part(expr.right)
    return int(number(expr) or 0)
