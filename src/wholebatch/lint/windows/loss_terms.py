"""The terms of a loss: where each was computed, and what divides it on the way to `backward`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..normalise import Event, NormalFile
from ..normalise.syntax import (
    changed,
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    is_not,
    last_part,
    number,
    positional,
    shown,
    strip_casts,
    text,
    written,
)

# Methods that move, cast or reduce a loss: `loss.mean()`, `loss.detach()`.
_THROUGH = {
    "scale", "float", "double", "half", "to", "cuda", "mean", "sum", "squeeze", "view", "clone",
    "reshape", "detach", "item", "clamp", "nan_to_num",
}  # fmt: skip
_OF_TORCH = {"torch.mean", "torch.sum", "torch.clamp", "torch.nan_to_num", "torch.stack", "sum"}
# Parts of the names of helpers that average a value over ranks, or cast it.
_OVER_RANKS = ("reduce", "gather", "average", "float")
_REDUCERS = {"mean", "sum"}
LOSS_NAME = re.compile(r"loss|nll|criterion|objective|entropy|(?<![a-z])(ce|mse|kl)(?![a-z])", re.I)
_WEIGHT = re.compile(r"\w*(scale|weight|coeff?|lambda|factor|ratio)\w*", re.I)
# Divisors that are unrelated to the number of micro-batches of a window.
DEVICES = re.compile(r"world_?size|n_?gpu|num_gpus?|device_count|num_processes", re.I)
_MAX_TERMS = 12
_MAX_DEPTH = 30


@dataclass(frozen=True, eq=False)
class Divisor:
    """One division of the loss."""

    expr: ast.expr
    node: ast.AST
    written: str  # As the source has it.
    elementwise: bool = False  # Divided before the values are added up, as by a length each.

    @property
    def key(self) -> str:
        """Return the divisor as comparable text."""
        return text(self.expr)


@dataclass(frozen=True, eq=False)
class Term:
    """One possible origin of a loss, or one part of a sum, followed back from `backward`."""

    base: ast.expr
    divisors: tuple[Divisor, ...] = ()
    factors: tuple[ast.expr, ...] = ()  # What the reduced loss is multiplied by.
    reducers: frozenset[str] = frozenset()

    @property
    def call(self) -> ast.Call | None:
        """Return the call that computed it: the `model(x)` of `out.loss`."""
        base: ast.AST = self.base
        while isinstance(base, (ast.Attribute, ast.Subscript)):
            base = base.value
        return base if isinstance(base, ast.Call) else None


def terms_of(event: Event, file: NormalFile) -> list[Term]:
    """Return every possible origin of the loss of a backward: at least one.

    A 0 to start from, or None for "no loss", is left out beside a real one.
    """
    if event.argument is None:
        return []
    terms = _Tracer(file).follow(event.argument, Term(event.argument), 0)
    return [t for t in terms if not _is_nothing(t.base)] or terms


def _is_nothing(base: ast.expr) -> bool:
    is_zero = isinstance(base, ast.Constant) or is_call(base, "zeros", "zeros_like")
    return is_zero or (is_call(base, "tensor", "float") and number(positional(base, 0)) == 0)


@dataclass(eq=False)
class _Tracer:
    """Follows a loss back to where it was computed; a term holds what is known so far."""

    file: NormalFile

    def follow(self, expr: ast.expr, term: Term, depth: int) -> list[Term]:
        """Return the origins of an expression, each with what is known of the term before it."""
        depth += 1
        symbol = self.file.symbols.get(getattr(expr, "id", ""))
        if depth > _MAX_DEPTH:
            return [replace(term, base=expr)]
        if symbol is not None and symbol.kind == "set" and symbol.value is not None:
            return self.follow(symbol.value, term, depth)
        if is_binary(expr, ast.Div, ast.FloorDiv):
            return self.follow(expr.left, self._divided(term, expr.right, expr), depth)
        if is_binary(expr, ast.Mult):
            loss, factor = _loss_side(expr.left, expr.right)
            return self.follow(loss, self._multiplied(term, factor, expr), depth)
        if is_binary(expr, ast.Add, ast.Sub):
            return self._each([expr.left, expr.right], term, depth)
        if isinstance(expr, ast.IfExp):
            # `if accum > 1: loss = loss / accum`: the branch that accumulates.
            holds = says_accumulating(expr.test, "")
            branches = [expr.body, expr.orelse] if holds is None else []
            return self._each(branches or [expr.body if holds else expr.orelse], term, depth)
        if isinstance(expr, ast.UnaryOp):
            return self.follow(expr.operand, term, depth)
        if isinstance(expr, ast.Call):
            return self._call(expr, term, depth)
        if isinstance(expr, ast.Subscript) and not isinstance(expr.slice, ast.Constant):
            return self.follow(expr.value, term, depth)
        if isinstance(expr, (ast.Attribute, ast.Subscript)):
            # `out.loss`: from the call that made `out`.
            value = self.file.value(expr.value)
            return [replace(term, base=changed(expr, value=value))]
        if isinstance(expr, (ast.ListComp, ast.GeneratorExp)):
            return self.follow(expr.elt, term, depth)
        if isinstance(expr, (ast.Tuple, ast.List)) and expr.elts:
            named = [e for e in expr.elts if LOSS_NAME.search(text(e))]
            return self.follow((named or expr.elts)[0], term, depth)
        return [replace(term, base=expr)]

    def _each(self, parts: Iterable[ast.expr], term: Term, depth: int) -> list[Term]:
        terms = [t for part in parts for t in self.follow(part, term, depth)]
        return terms[:_MAX_TERMS]

    def _call(self, expr: ast.Call, term: Term, depth: int) -> list[Term]:
        func = expr.func
        if isinstance(func, ast.Attribute) and expr.args:
            loss, by = func.value, expr.args[0]
            if func.attr in {"div", "div_"}:
                if dotted(loss) == "torch" and len(expr.args) == 2:
                    loss, by = expr.args
                return self.follow(loss, self._divided(term, by, expr), depth)
            if func.attr in {"mul", "mul_"}:
                return self.follow(loss, self._multiplied(term, by, expr), depth)
        inner = _loss_inside(expr)
        if inner is None:
            return [replace(term, base=expr)]
        reducers = term.reducers | (
            {last_part(func)} & _REDUCERS if dotted(func) != "sum" else set()
        )
        return self.follow(inner, replace(term, reducers=reducers), depth)

    def _divided(self, term: Term, by: ast.expr, node: ast.AST) -> Term:
        """Return the term with a divisor for each factor: `a / (b * c)` is divided by b and c."""
        elementwise = not term.reducers.isdisjoint(_REDUCERS)
        divisors = [
            Divisor(strip_casts(factor), node, _written_divisor(node, factor), elementwise)
            for factor in _factors(by)
        ]
        return replace(term, divisors=(*term.divisors, *divisors))

    def _multiplied(self, term: Term, factor: ast.expr, node: ast.AST) -> Term:
        inverse = _reciprocal(self.file.value(factor))
        if inverse is not None:
            return self._divided(term, inverse, node)
        if not term.reducers.isdisjoint(_REDUCERS):
            return term
        return replace(term, factors=(*term.factors, factor))


def _written_divisor(node: ast.AST, factor: ast.expr) -> str:
    """Return a divisor as the source has it, which may be a name for a literal."""
    source = written(node)
    if is_binary(source, ast.Div) and not is_binary(source.right, ast.Mult):
        return shown(source.right)
    if isinstance(source, ast.Call) and source.args:
        return shown(source.args[-1])
    return shown(written(factor))


def _factors(by: ast.expr) -> list[ast.expr]:
    if is_binary(by, ast.Mult):
        return [*_factors(by.left), *_factors(by.right)]
    return [by]


def _loss_inside(call: ast.Call) -> ast.expr | None:
    """Return the loss of a call that only moves, scales or reduces it: `loss.mean()`."""
    name, first = last_part(call.func), positional(call, 0)
    over_ranks = any(word in name for word in _OVER_RANKS) and len(call.args) <= 2
    if first is not None and (over_ranks or name == "scale" or dotted(call.func) in _OF_TORCH):
        return first
    if isinstance(call.func, ast.Attribute) and name in _THROUGH:
        return call.func.value if dotted(call.func.value) != "torch" else None
    return None


def _loss_side(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    """Return the side of a product that is the loss, and the other."""
    for loss, factor in ((right, left), (left, right)):
        if number(factor) is not None or _reciprocal(factor) is not None:
            return loss, factor
    names = [LOSS_NAME.search(_WEIGHT.sub("", text(side))) for side in (left, right)]
    return (right, left) if names[1] and not names[0] else (left, right)


def _reciprocal(expr: ast.AST | None) -> ast.expr | None:
    return expr.right if is_binary(expr, ast.Div) and number(expr.left) == 1 else None


def says_accumulating(expr: ast.expr, key: str) -> bool | None:
    """True if a condition means "accumulation is on" (`k > 1`), False if "off", else None."""
    if is_not(expr):
        inner = says_accumulating(expr.operand, key)
        return None if inner is None else not inner
    if not isinstance(expr, ast.Compare):
        return True if _names_count(expr, key) else None
    op, limit = expr.ops[0], number(expr.comparators[0])
    if len(expr.ops) != 1 or not _names_count(expr.left, key) or limit not in {0.0, 1.0, 2.0}:
        return None
    if isinstance(op, ast.NotEq) or (isinstance(op, (ast.Gt, ast.GtE)) and limit <= 1):
        return True
    if isinstance(op, ast.GtE):
        return True
    is_off = isinstance(op, ast.Lt) or (isinstance(op, (ast.Eq, ast.LtE)) and limit <= 1)
    return False if is_off else None


def _names_count(expr: ast.expr, key: str) -> bool:
    expr = strip_casts(expr)
    if text(expr) == key and key:
        return True
    is_name = dotted(expr) is not None or isinstance(expr, ast.Subscript)
    return is_name and is_accumulation_name(text(expr))
