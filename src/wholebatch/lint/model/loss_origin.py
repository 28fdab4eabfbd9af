"""The origin of a loss, and its divisors on the way to `backward`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from .events import Env
from .expressions import (
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    last_part,
    number,
    positional,
    root,
    slot_name,
    text,
    without_marks,
)
from .name_resolution import Resolver, strip_casts
from .window_boundary import says_accumulating

# Methods that move, cast or reduce a loss: `loss.mean()`, `loss.detach()`.
_THROUGH = {
    "scale", "float", "double", "half", "to", "cuda", "cpu", "mean", "sum", "squeeze", "view",
    "contiguous", "clone", "unsqueeze", "scale_loss", "nan_to_num", "reshape", "requires_grad_",
    "detach", "item", "data", "clamp", "clamp_", "repeat", "numpy", "detach_", "tolist", "expand",
    "type", "bfloat16",
}  # fmt: skip
_OF_TORCH = {
    "torch.mean", "torch.sum", "torch.clamp", "torch.clip", "torch.nan_to_num", "torch.sqrt",
    "torch.tensor", "torch.as_tensor",
}  # fmt: skip
# Parts of the names of helpers that average a value over ranks, or cast it.
_OVER_RANKS = ("reduce", "gather", "average", "mean_scalar")
_REDUCERS = {"item", "detach", "mean", "sum"}
LOSS_NAME = re.compile(r"loss|nll|criterion|objective|entropy|(?<![a-z])(ce|mse|kl)(?![a-z])", re.I)
_WEIGHT = re.compile(r"\w*(scale|weight|coeff?|lambda|factor|ratio)\w*", re.I)
# Divisors that are unrelated to the number of micro-batches of a window.
_DEVICES = re.compile(r"world_?size|n_?gpu|num_gpus?|device_count", re.I)
_MAX_CHAINS = 8
_MAX_DEPTH = 24
_MAX_NAMES = 4


@dataclass(frozen=True, eq=False)
class Divisor:
    """One division of the loss: the resolved divisor, and where it is written."""

    expr: ast.expr
    node: ast.AST
    key: str
    by: ast.expr
    env: Env
    elementwise: bool = False  # Divided before the values are added up, as by a length each.
    whole: str = ""  # The product that it is a factor of, as `key` is.

    @property
    def written(self) -> str:
        """Return the divisor as it is written."""
        return text(self.by)

    @property
    def unrelated(self) -> bool:
        """True if the divisor is a number of devices or written as a literal."""
        return bool(_DEVICES.search(self.key)) or number(self.expr) is not None


@dataclass(frozen=True, eq=False)
class Chain:
    """One possible derivation of a loss, from `backward` back to where it was computed."""

    divisors: tuple[Divisor, ...] = ()
    factors: tuple[str, ...] = ()
    base: ast.expr | None = None
    base_env: Env = field(default_factory=lambda: Env())
    reducers: frozenset[str] = frozenset()
    selected: bool = False  # Some elements of it, by a mask: `loss[mask]`.
    weights: tuple[ast.expr, ...] = ()  # What the reduced loss is multiplied by, resolved.

    @property
    def base_call(self) -> ast.Call | None:
        """Return the call that computed the loss: the `model(x)` of `out.loss`, through a name."""
        base = None if self.base is None else root(self.base)
        if isinstance(base, ast.Name):
            defs = self.base_env.get(base.id, ())
            chosen = [d.expr.body if isinstance(d.expr, ast.IfExp) else d.expr for d in defs]
            return next((c for c in map(root, chosen) if isinstance(c, ast.Call)), None)
        return base if isinstance(base, ast.Call) else None


def trace(expr: ast.expr | None, env: Env, resolver: Resolver) -> list[Chain]:
    """Return every possible derivation of a loss: at least one, at most eight.

    A 0 to start from, or None for "no loss", is left out beside a real one.
    """
    chains = [Chain()] if expr is None else _Tracer(resolver).follow(expr, env, Chain(), 0)
    return [c for c in chains if not _is_nothing(c.base)] or chains


def _is_nothing(base: ast.expr | None) -> bool:
    is_zero = isinstance(base, ast.Constant) or is_call(base, "zeros", "zeros_like", "new_zeros")
    return is_zero or (is_call(base, "tensor", "float") and number(positional(base, 0)) == 0)


class _Tracer:
    """Follows a loss back to where it was computed; a chain holds what is known so far."""

    def __init__(self, resolver: Resolver) -> None:
        self.resolver = resolver

    def follow(self, expr: ast.expr, env: Env, chain: Chain, depth: int) -> list[Chain]:
        """Return the derivations of an expression, each with the chain before it."""
        ended = [replace(chain, base=expr, base_env=env)]
        if depth > _MAX_DEPTH:
            return ended
        if isinstance(expr, ast.BinOp):
            return self._operation(expr, env, chain, depth)
        if isinstance(expr, ast.IfExp):
            # `loss * k if k > 1 else loss`: the branch that accumulates.
            accumulates = says_accumulating(expr.test, "")
            branches = {True: (expr.body,), False: (expr.orelse,)}
            ways = branches.get(accumulates, (expr.body, expr.orelse))  # type: ignore[arg-type]
            return self._each([(way, env) for way in ways], chain, depth)
        if isinstance(expr, (ast.UnaryOp, ast.NamedExpr)):
            inner = expr.operand if isinstance(expr, ast.UnaryOp) else expr.value
            return self.follow(inner, env, chain, depth + 1)
        name = slot_name(expr)
        if name is not None and env.get(name):
            return self._definitions(expr, name, env, chain, depth)
        if isinstance(expr, ast.Call):
            return self._call(expr, env, chain, depth)
        if isinstance(expr, ast.Subscript):
            parts = self._returned_parts(expr, env)
            if not isinstance(expr.slice, ast.Constant):
                parts.append((expr.value, env))  # `losses[k]`
                chain = replace(chain, selected=chain.selected or _is_mask(expr.slice))
            return self._each(parts, chain, depth) or ended
        return ended

    def _each(self, parts: Iterable[tuple[ast.expr, Env]], chain: Chain, depth: int) -> list[Chain]:
        chains = [c for expr, env in parts for c in self.follow(expr, env, chain, depth + 1)]
        return chains[:_MAX_CHAINS]

    def _definitions(
        self, expr: ast.expr, name: str, env: Env, chain: Chain, depth: int
    ) -> list[Chain]:
        ways: list[list[Chain]] = []
        # Beside a new value, that of an earlier iteration is an old one of the same kind.
        new = [d for d in env[name] if not (isinstance(d.expr, ast.Name) and "@" in d.expr.id)]
        for definition in new or env[name]:
            # A helper's parameter can have the name of what it is handed.
            same = slot_name(definition.expr) == name
            again = same and definition.env.get(name) in (None, env[name])
            if again or "@" in text(definition.expr):
                ways.append([replace(chain, base=expr, base_env=env)])
            else:
                ways.append(self.follow(definition.expr, definition.env, chain, depth + 1))
        # By turns, so that no definition is cut off by another.
        return [c for turn in zip_longest(*ways) for c in turn if c is not None][:_MAX_CHAINS]

    def _returned_parts(self, expr: ast.Subscript, env: Env) -> list[tuple[ast.expr, Env]]:
        """Return the parts of the tuples that a followed helper returns: `helper(x)[0]`."""
        index = expr.slice.value if isinstance(expr.slice, ast.Constant) else None
        return [
            (d.expr.elts[index], d.env)
            for d in self.resolver.returns.get((env.frame, id(expr.value)), ())
            if isinstance(d.expr, ast.Tuple) and isinstance(index, int) and index < len(d.expr.elts)
        ]

    def _operation(self, expr: ast.BinOp, env: Env, chain: Chain, depth: int) -> list[Chain]:
        if isinstance(expr.op, (ast.Div, ast.FloorDiv)):
            chain = self._divided(chain, expr.right, expr, env)
            return self.follow(expr.left, env, chain, depth + 1)
        if isinstance(expr.op, ast.Mult):
            loss, factor = _loss_side(expr.left, expr.right)
            return self.follow(loss, env, self._multiplied(chain, factor, expr, env), depth + 1)
        if isinstance(expr.op, (ast.Add, ast.Sub)):
            return self._each([(expr.left, env), (expr.right, env)], chain, depth)
        return [replace(chain, base=expr, base_env=env)]

    def _call(self, expr: ast.Call, env: Env, chain: Chain, depth: int) -> list[Chain]:
        scaled = self._scaled(expr, env, chain)
        if scaled is not None:
            return self.follow(scaled[0], env, scaled[1], depth + 1)
        returned = self.resolver.returns.get((env.frame, id(expr)))
        if returned:
            return self._each([(_loss_part(d.expr), d.env) for d in returned], chain, depth)
        inner = _loss_inside(expr)
        if inner is not None:
            reducers = chain.reducers | ({last_part(expr.func)} & _REDUCERS)
            return self.follow(inner, env, replace(chain, reducers=reducers), depth + 1)
        if dotted(expr.func) == "sum" and len(expr.args) == 1:
            return self.follow(expr.args[0], env, chain, depth + 1)
        if last_part(expr.func) == "values" and isinstance(expr.func, ast.Attribute):
            return self.follow(expr.func.value, env, chain, depth + 1)
        return [replace(chain, base=expr, base_env=env)]

    def _scaled(self, expr: ast.Call, env: Env, chain: Chain) -> tuple[ast.expr, Chain] | None:
        """Return the loss and chain of `loss.div(k)`, `torch.div(loss, k)` or `loss.mul(f)`."""
        if not isinstance(expr.func, ast.Attribute) or not expr.args:
            return None
        loss, by = expr.func.value, expr.args[0]
        if expr.func.attr in {"div", "div_", "true_divide"}:
            if dotted(loss) == "torch" and len(expr.args) == 2:
                loss, by = expr.args
            return loss, self._divided(chain, by, expr, env)
        if expr.func.attr in {"mul", "mul_"}:
            return loss, self._multiplied(chain, by, expr, env)
        return None

    def _divided(self, chain: Chain, by: ast.expr, node: ast.AST, env: Env) -> Chain:
        """Return the chain with a divisor for each factor: `a / (b * c)` is divided by b and c."""
        whole = without_marks(text(strip_casts(self.resolver.resolve(by, env))))
        elementwise = not chain.reducers.isdisjoint({"mean", "sum"})
        divisors = []
        for factor, where in _factors(by, env):
            resolved = strip_casts(self.resolver.resolve(factor, where))
            key = without_marks(text(resolved))
            divisors.append(Divisor(resolved, node, key, factor, where, elementwise, whole))
        return replace(chain, divisors=(*chain.divisors, *divisors))

    def _multiplied(self, chain: Chain, factor: ast.expr, node: ast.AST, env: Env) -> Chain:
        resolved = self.resolver.resolve(factor, env)
        inverse = _reciprocal(resolved)
        if inverse is not None:
            return self._divided(chain, inverse, node, env)
        if chain.reducers.isdisjoint({"mean", "sum"}):
            chain = replace(chain, weights=(*chain.weights, resolved))
        written = text(factor)
        key = written if is_accumulation_name(written) else self.resolver.key(factor, env)
        return replace(chain, factors=(*chain.factors, key))


def _factors(by: ast.expr, env: Env, depth: int = 0) -> list[tuple[ast.expr, Env]]:
    """Return the factors of a divisor, also of one that has a name of its own."""
    if is_binary(by, ast.Mult):
        return [*_factors(by.left, env, depth), *_factors(by.right, env, depth)]
    defs = env.get(dotted(by) or "", ())
    is_product = len(defs) == 1 and is_binary(defs[0].expr, ast.Mult) and depth < _MAX_NAMES
    if is_product and not is_accumulation_name(text(by)) and not hasattr(defs[0].expr, "augmented"):
        return _factors(defs[0].expr, defs[0].env, depth + 1)
    return [(by, env)]


def _is_mask(index: ast.expr) -> bool:
    index = index.operand if isinstance(index, ast.UnaryOp) else index
    return isinstance(index, ast.Compare) or "mask" in (dotted(index) or "")


def _loss_inside(call: ast.Call) -> ast.expr | None:
    """Return the loss of a call that only moves, scales or reduces it: `loss.mean()`."""
    name = last_part(call.func)
    first = call.args[0] if call.args else None
    over_ranks = name == "float" or any(word in name for word in _OVER_RANKS)
    if over_ranks and first is not None and len(call.args) <= 2:
        return first
    if (name in {"scale", "scale_loss"} and first is not None) or dotted(call.func) in _OF_TORCH:
        return first
    if isinstance(call.func, ast.Attribute) and name in _THROUGH:
        return call.func.value if dotted(call.func.value) != "torch" else None
    return None


def _loss_part(expr: ast.expr) -> ast.expr:
    if isinstance(expr, ast.Tuple) and expr.elts:
        named = [e for e in expr.elts if LOSS_NAME.search(text(e))]
        return named[0] if named else expr.elts[0]
    return expr


def _loss_side(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    if number(left) is not None or _reciprocal(left) is not None:
        return right, left
    if number(right) is not None or _reciprocal(right) is not None:
        return left, right
    left_is_loss, right_is_loss = (
        bool(LOSS_NAME.search(_WEIGHT.sub("", text(side)))) for side in (left, right)
    )
    return (right, left) if right_is_loss and not left_is_loss else (left, right)


def _reciprocal(expr: ast.expr) -> ast.expr | None:
    if is_binary(expr, ast.Div) and number(expr.left) == 1:
        return expr.right
    return None
