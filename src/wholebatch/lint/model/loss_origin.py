"""The origin of a loss, and its divisors on the way to `backward`."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace

from .events import Def, Env
from .expressions import dotted, is_accumulation_name, last_part, number, place, text
from .name_resolution import Resolver, strip_casts

__all__ = ["Chain", "Divisor", "trace"]

_THROUGH = {
    "scale", "float", "double", "half", "to", "cuda", "cpu", "mean", "sum", "squeeze", "view",
    "contiguous", "clone", "unsqueeze", "scale_loss", "nan_to_num", "reshape", "requires_grad_",
    "detach", "item", "data", "clamp", "clamp_",
}  # fmt: skip
_REDUCERS = {"item", "detach", "mean", "sum"}
_LOSSY = re.compile(r"loss|nll|criterion|objective|ce$|mse", re.I)
# Divisors that are unrelated to the number of micro-batches of a window.
_UNRELATED = re.compile(r"world_?size|n_?gpu|num_gpus?|device_count|get_world_size", re.I)
# The size of the micro-batch itself: dividing by it turns a sum into a mean.
_OWN_SIZE = re.compile(r"\.shape\[\d\]$|\.size\(\d?\)$|\.numel\(\)$")
_MAX_CHAINS = 8


@dataclass(frozen=True, eq=False)
class Divisor:
    """One division of the loss: the resolved divisor, and where it is written."""

    expr: ast.expr
    node: ast.AST
    key: str
    written: str

    @property
    def names_accumulation(self) -> bool:
        """True if the name of the divisor says that it counts micro-batches."""
        return is_accumulation_name(self.key) or is_accumulation_name(self.written)

    @property
    def own_size(self) -> bool:
        """True if the divisor is the size of the micro-batch, which turns a sum into a mean."""
        return bool(_OWN_SIZE.search(self.key))

    @property
    def unrelated(self) -> bool:
        """True if the divisor is a number of devices or a literal."""
        return bool(_UNRELATED.search(self.key)) or number(self.expr) is not None


@dataclass(frozen=True, eq=False)
class Chain:
    """One possible derivation of a loss, from `backward` back to where it was computed."""

    divisors: tuple[Divisor, ...] = ()
    factors: tuple[str, ...] = ()
    base: ast.expr | None = None
    base_env: Env = field(default_factory=lambda: Env())
    base_def: Def | None = None
    reducers: frozenset[str] = frozenset()


def trace(expr: ast.expr | None, env: Env, resolver: Resolver) -> list[Chain]:
    """Return every possible derivation of a loss: at least one, at most eight."""
    if expr is None:
        return [Chain()]
    return _trace(expr, env, resolver, Chain(), 0)[:_MAX_CHAINS]


def _trace(expr: ast.expr, env: Env, resolver: Resolver, so_far: Chain, depth: int) -> list[Chain]:
    if depth > 24:
        return [replace(so_far, base=expr, base_env=env)]
    if isinstance(expr, ast.BinOp):
        return _operation(expr, env, resolver, so_far, depth)
    if isinstance(expr, ast.IfExp):
        return [
            *_trace(expr.body, env, resolver, so_far, depth + 1),
            *_trace(expr.orelse, env, resolver, so_far, depth + 1),
        ]
    if isinstance(expr, ast.UnaryOp):
        return _trace(expr.operand, env, resolver, so_far, depth + 1)
    name = place(expr)
    if name is not None and env.get(name):
        found: list[Chain] = []
        for definition in env[name]:
            here = replace(so_far, base_def=definition)
            if place(definition.expr) == name or "@" in text(definition.expr):
                found.append(replace(so_far, base=expr, base_env=env))
            else:
                found += _trace(definition.expr, definition.env, resolver, here, depth + 1)
        return found[:_MAX_CHAINS]
    if isinstance(expr, ast.Call):
        return _call(expr, env, resolver, so_far, depth)
    if isinstance(expr, ast.Subscript) and isinstance(expr.value, ast.Call):
        returned = resolver.returns.get(id(expr.value))
        if returned and isinstance(expr.slice, ast.Constant):
            index = expr.slice.value
            parts = [
                (d.expr.elts[index], d.env)
                for d in returned
                if isinstance(d.expr, ast.Tuple)
                and isinstance(index, int)
                and index < len(d.expr.elts)
            ]
            if parts:
                return [c for e, v in parts for c in _trace(e, v, resolver, so_far, depth + 1)][
                    :_MAX_CHAINS
                ]
    return [replace(so_far, base=expr, base_env=env)]


def _operation(
    expr: ast.BinOp, env: Env, resolver: Resolver, so_far: Chain, depth: int
) -> list[Chain]:
    if isinstance(expr.op, (ast.Div, ast.FloorDiv)):
        return _trace(
            expr.left, env, resolver, _divided(so_far, expr.right, expr, env, resolver), depth + 1
        )
    if isinstance(expr.op, ast.Mult):
        loss, factor = _loss_side(expr.left, expr.right)
        inverse = _reciprocal(resolver.resolve(factor, env))
        if inverse is not None:
            chain = _divided(so_far, inverse, expr, env, resolver)
        elif number(factor) is None:
            spelled = resolver.key(factor, env)
            chain = replace(so_far, factors=(*so_far.factors, spelled))
        else:
            chain = so_far
        return _trace(loss, env, resolver, chain, depth + 1)
    if isinstance(expr.op, (ast.Add, ast.Sub)):
        return [
            *_trace(expr.left, env, resolver, so_far, depth + 1),
            *_trace(expr.right, env, resolver, so_far, depth + 1),
        ][:_MAX_CHAINS]
    return [replace(so_far, base=expr, base_env=env)]


def _call(expr: ast.Call, env: Env, resolver: Resolver, so_far: Chain, depth: int) -> list[Chain]:
    name = last_part(expr.func)
    owner = expr.func.value if isinstance(expr.func, ast.Attribute) else None
    if name in {"div", "div_", "true_divide"} and expr.args:
        if owner is not None and dotted(owner) == "torch" and len(expr.args) == 2:
            owner, by = expr.args[0], expr.args[1]
        else:
            by = expr.args[0]
        if owner is not None:
            chain = _divided(so_far, by, expr, env, resolver)
            return _trace(owner, env, resolver, chain, depth + 1)
    if name in {"mul", "mul_"} and expr.args and owner is not None:
        inverse = _reciprocal(resolver.resolve(expr.args[0], env))
        chain = (
            _divided(so_far, inverse, expr, env, resolver)
            if inverse is not None
            else replace(so_far, factors=(*so_far.factors, resolver.key(expr.args[0], env)))
        )
        return _trace(owner, env, resolver, chain, depth + 1)
    returned = resolver.returns.get(id(expr))
    if returned:
        return [
            chain
            for d in returned
            for chain in _trace(_loss_part(d.expr), d.env, resolver, so_far, depth + 1)
        ][:_MAX_CHAINS]
    if name in {"scale", "scale_loss"} and expr.args:
        return _trace(expr.args[0], env, resolver, so_far, depth + 1)
    if name in {"mean", "sum"} and owner is not None and dotted(owner) == "torch" and expr.args:
        chain = replace(so_far, reducers=so_far.reducers | {name})
        return _trace(expr.args[0], env, resolver, chain, depth + 1)
    if owner is not None and name in _THROUGH and dotted(owner) != "torch":
        chain = replace(so_far, reducers=so_far.reducers | ({name} & _REDUCERS))
        return _trace(owner, env, resolver, chain, depth + 1)
    if (
        name in {"clamp", "clip", "nan_to_num"}
        and expr.args
        and dotted(expr.func) == f"torch.{name}"
    ):
        return _trace(expr.args[0], env, resolver, so_far, depth + 1)
    if name == "sum" and len(expr.args) == 1 and owner is None:
        return [replace(so_far, base=expr.args[0], base_env=env)]
    return [replace(so_far, base=expr, base_env=env)]


def _loss_part(expr: ast.expr) -> ast.expr:
    if isinstance(expr, ast.Tuple) and expr.elts:
        named = [e for e in expr.elts if _LOSSY.search(text(e))]
        return named[0] if named else expr.elts[0]
    return expr


def _loss_side(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    if number(left) is not None or _reciprocal(left) is not None:
        return right, left
    if number(right) is not None or _reciprocal(right) is not None:
        return left, right
    left_is_loss = bool(_LOSSY.search(text(left)))
    right_is_loss = bool(_LOSSY.search(text(right)))
    return (right, left) if right_is_loss and not left_is_loss else (left, right)


def _reciprocal(expr: ast.expr) -> ast.expr | None:
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Div) and number(expr.left) == 1:
        return expr.right
    return None


def _divided(chain: Chain, by: ast.expr, node: ast.AST, env: Env, resolver: Resolver) -> Chain:
    resolved = strip_casts(resolver.resolve(by, env))
    key = re.sub(r"@\d+", "", text(resolved))
    return replace(chain, divisors=(*chain.divisors, Divisor(resolved, node, key, text(by))))
