"""The origin of a loss, and its divisors on the way to `backward`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from .events import Def, Env
from .expressions import (
    assigned_names,
    children,
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    keyword,
    last_part,
    number,
    place,
    positional,
    root,
    text,
    walk,
)
from .name_resolution import Resolver, strip_casts
from .window_boundary import says_accumulating

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
# Helpers that average a value over ranks: what goes in is what comes out, for one rank.
_OVER_RANKS = re.compile(
    r"reduce|gather|average|dist_mean|mean_scalar|pmean|^float$|^to_python", re.I
)
# Calls that leave a number as it is, but for its type, device or a lower limit.
_SAME_NUMBER = {
    "clamp", "clamp_", "clamp_min", "clip", "item", "float", "int", "long", "double", "to", "type",
    "detach", "cpu", "cuda", "type_as",
}  # fmt: skip
_LIMITS = {"max", "int", "float", "torch.clamp", "torch.clip", "torch.clamp_min", "torch.maximum"}
_REDUCERS = {"item", "detach", "mean", "sum"}
_LOSSY = re.compile(r"loss|nll|criterion|objective|ce$|mse", re.I)
_WEIGHT = re.compile(r"\w*(scale|weight|coeff?|lambda|factor|ratio)\w*", re.I)
# Divisors that are unrelated to the number of micro-batches of a window.
_UNRELATED = re.compile(r"world_?size|n_?gpu|num_gpus?|device_count|get_world_size", re.I)
# Objects that remember the losses of other micro-batches.
_KEEPS = re.compile(r"accum|smooth|ema|avg|average|meter|running|moving|window|update|track", re.I)
_MAX_CHAINS = 8


@dataclass(frozen=True, eq=False)
class Divisor:
    """One division of the loss: the resolved divisor, and where it is written."""

    expr: ast.expr
    node: ast.AST
    key: str
    by: ast.expr
    env: Env
    elementwise: bool = False  # Divided before the values are added up, as by a length each.

    @property
    def written(self) -> str:
        """Return the divisor as it is written."""
        return text(self.by)

    @property
    def unrelated(self) -> bool:
        """True if the divisor is a number of devices or written as a literal."""
        return bool(_UNRELATED.search(self.key) or re.fullmatch(r"[\d.e-]+", self.written))


@dataclass(frozen=True, eq=False)
class Chain:
    """One possible derivation of a loss, from `backward` back to where it was computed."""

    divisors: tuple[Divisor, ...] = ()
    factors: tuple[str, ...] = ()
    base: ast.expr | None = None
    base_env: Env = field(default_factory=lambda: Env())
    reducers: frozenset[str] = frozenset()
    weighted: bool = False  # Multiplied by something on the way: one term of a weighted mean.
    selected: bool = False  # Some elements of it, by a mask: `loss[mask]`.
    weights: tuple[ast.expr, ...] = ()  # What the reduced loss is multiplied by, resolved.

    @property
    def base_call(self) -> ast.Call | None:
        """Return the call that computed the loss: the `model(x)` of `out.loss`, through a name."""
        made = None if self.base is None else root(self.base)
        if isinstance(made, ast.Name):
            defs = self.base_env.get(made.id, ())
            chosen = [d.expr.body if isinstance(d.expr, ast.IfExp) else d.expr for d in defs]
            return next((c for c in map(root, chosen) if isinstance(c, ast.Call)), None)
        return made if isinstance(made, ast.Call) else None


def trace(
    expr: ast.expr | None, env: Env, resolver: Resolver, known: frozenset[int] = frozenset()
) -> list[Chain]:
    """Return every possible derivation of a loss: at least one, at most eight.

    A value that is computed from one of the `known` bases in any way is followed to it. A 0 to
    start from, or None for "no loss", is left out beside a real one.
    """
    chains = [Chain()] if expr is None else _Tracer(resolver, known).follow(expr, env, Chain(), 0)
    return [c for c in chains if not _is_nothing(c.base)] or chains


def _is_nothing(base: ast.expr | None) -> bool:
    made = isinstance(base, ast.Constant) or is_call(base, "zeros", "zeros_like", "new_zeros")
    return made or (is_call(base, "tensor", "float") and number(positional(base, 0)) == 0)


def counted(
    expr: ast.expr, env: Env, returns: Mapping[int, list[Def]] | None = None, depth: int = 0
) -> list[tuple[ast.expr, Env]]:
    """Return what a number is computed from, through names, helpers, casts, limits and `+ 1e-5`."""
    name = place(expr)
    defs = [d for d in env.get(name or "", ()) if place(d.expr) != name]
    defs += (returns or {}).get(id(expr), ())
    inner: list[tuple[ast.expr, Env]] = [(d.expr, d.env) for d in defs]
    if isinstance(expr, ast.IfExp):
        inner = [(expr.body, env), (expr.orelse, env)]
    elif is_binary(expr, ast.Add) and (number(expr.right) is not None or "eps" in text(expr.right)):
        inner = [(expr.left, env)]
    elif is_binary(expr, ast.Sub):
        inner = [(expr.left, env), (expr.right, env)]
    elif isinstance(expr, ast.Call) and dotted(expr.func) in _LIMITS:
        inner = [(part, env) for part in expr.args[:1]]
    elif is_call(expr, *_SAME_NUMBER) and isinstance(expr.func, ast.Attribute):
        inner = [(expr.func.value, env)]
    if not inner or depth > 12:
        return [(expr, env)]
    return [end for part, where in inner for end in counted(part, where, returns, depth + 1)]


def is_whole_sum(expr: ast.expr) -> bool:
    """True for `mask.sum()` and `torch.count_nonzero(x)`: a number that the data decide."""
    names = ("sum", "count_nonzero", "nansum", "reduce_sum")
    if not is_call(expr, *names) or not isinstance(expr.func, ast.Attribute):
        return False
    of_torch = dotted(expr.func.value) in {"torch", "np", "numpy", "jnp", "tf", "tf.math"}
    # `torch.sum(mask.view(-1), dim=0)`
    flat = re.search(r"view\(-1\)|reshape\(-1\)|flatten\(\)", text(expr))
    return len(expr.args) == of_torch and (not expr.keywords or flat is not None)


class _Tracer:
    """Follows a loss back to where it was computed; a chain holds what is known so far."""

    def __init__(self, resolver: Resolver, known: frozenset[int]) -> None:
        self.resolver = resolver
        self.known = known

    def follow(self, expr: ast.expr, env: Env, chain: Chain, depth: int) -> list[Chain]:
        """Return the derivations of an expression, each with the chain before it."""
        ended = [replace(chain, base=expr, base_env=env)]
        if depth > 24 or id(expr) in self.known:
            return ended
        if isinstance(expr, ast.BinOp):
            return self._operation(expr, env, chain, depth)
        if isinstance(expr, ast.IfExp):
            # `loss * k if k > 1 else loss`: the branch that accumulates.
            accumulates = says_accumulating(expr.test, "")
            branches = {True: (expr.body,), False: (expr.orelse,)}
            ways = branches.get(accumulates, (expr.body, expr.orelse))  # type: ignore[arg-type]
            return self._each([(way, env) for way in ways], chain, depth)
        if isinstance(expr, ast.UnaryOp):
            return self.follow(expr.operand, env, chain, depth + 1)
        name = place(expr)
        if name is not None and env.get(name):
            return self._definitions(expr, name, env, chain, depth)
        if isinstance(expr, ast.Call):
            return self._call(expr, env, chain, depth)
        if isinstance(expr, ast.Subscript):
            parts = [*self._returned_parts(expr), *self._entries(expr, env)]
            if not isinstance(expr.slice, ast.Constant):
                parts.append((expr.value, env))  # `losses[k]`
                chain = replace(chain, selected=chain.selected or _is_mask(expr.slice))
            return self._each(parts, chain, depth) or ended
        if isinstance(expr, ast.Attribute):
            fields = self._each(self._fields(expr, env), chain, depth)
            return fields or self._computed(expr, env, chain, depth)
        if isinstance(expr, (ast.GeneratorExp, ast.ListComp, ast.DictComp)):
            return self._comprehension(expr, env, chain, depth)
        return self._computed(expr, env, chain, depth)

    def _computed(self, expr: ast.expr, env: Env, chain: Chain, depth: int) -> list[Chain]:
        """Follow the parts of an expression that lead to a known base, or end here."""
        called = last_part(expr.func) if isinstance(expr, ast.Call) else ""
        parts = [c.value if isinstance(c, ast.keyword) else c for c in children(expr)]
        inner = [part for part in parts if isinstance(part, ast.expr)]
        if not self.known or depth > 12 or _KEEPS.search(called):
            inner = []
        chains = self._each(((part, env) for part in inner), chain, depth)
        known = [c for c in chains if id(c.base) in self.known]
        # What is added up over iterations is more than one loss.
        slots = [c.base_env.get(place(c.base or expr) or "", ()) for c in chains if c not in known]
        summed = any("loss" in text(d.expr) and "@" in text(d.expr) for s in slots for d in s)
        return known if known and not summed else [replace(chain, base=expr, base_env=env)]

    def _comprehension(
        self,
        expr: ast.GeneratorExp | ast.ListComp | ast.DictComp,
        env: Env,
        chain: Chain,
        depth: int,
    ) -> list[Chain]:
        """Follow `w * losses[k] for k in losses` or `v for v in losses.values()` to the losses."""
        element = expr.value if isinstance(expr, ast.DictComp) else expr.elt
        over = expr.generators[0].iter
        if isinstance(over, ast.Call) and last_part(over.func) in {"items", "values", "keys"}:
            over = over.func.value  # type: ignore[attr-defined]
        inside = Env(env)
        for name in assigned_names([ast.Assign([expr.generators[0].target], element)]):
            inside.bind(name, (Def(over, env, ()),))
        return self.follow(element, inside, chain, depth + 1)

    def _entries(self, expr: ast.Subscript, env: Env) -> list[tuple[ast.expr, Env]]:
        """Return the values of `metrics['loss']` in the dictionaries that `metrics` can be."""
        key = text(expr.slice)
        held: list[tuple[ast.expr, Env]] = [(expr.value, env)]
        found: list[tuple[ast.expr, Env]] = []
        returned = False
        for _ in range(12):
            if not held:
                break
            made, where = held.pop()
            if isinstance(made, ast.Dict):
                pairs = zip(made.keys, made.values, strict=True)
                found += [(v, where) for k, v in pairs if k is not None and text(k) == key]
            elif is_call(made, "dict"):
                found += [(k.value, where) for k in made.keywords if repr(k.arg) == key]
            elif isinstance(made, ast.Call):
                returned = True
                held += [(d.expr, d.env) for d in self.resolver.returns.get(id(made), ())]
            elif isinstance(made, ast.Subscript):
                parts = self._returned_parts(made)
                # What a helper hands on from a call that is not followed.
                handed_on = returned and not parts and isinstance(made.value, ast.Call)
                held, found = held + parts, found + [(made, where)] * handed_on
            elif (name := place(made)) is not None:
                held += [(d.expr, d.env) for d in where.get(name, ()) if place(d.expr) != name]
        return found

    def _fields(self, expr: ast.Attribute, env: Env) -> list[tuple[ast.expr, Env]]:
        """Return the `loss` of `out = helper(x)` where the helper returns `Output(loss, ...)`."""
        calls = [d.expr for d in env.get(dotted(expr.value) or "", ())]
        made = [d for call in calls for d in self.resolver.returns.get(id(call), ())]
        found = []
        for d in made:
            if isinstance(d.expr, ast.Call) and last_part(d.expr.func)[:1].isupper():
                first = positional(d.expr, 0) if expr.attr == "loss" else None
                value = keyword(d.expr, expr.attr) or first
                found += [] if value is None else [(value, d.env)]
        return found

    def _each(self, parts: Iterable[tuple[ast.expr, Env]], chain: Chain, depth: int) -> list[Chain]:
        chains = [c for expr, env in parts for c in self.follow(expr, env, chain, depth + 1)]
        return chains[:_MAX_CHAINS]

    def _definitions(
        self, expr: ast.expr, name: str, env: Env, chain: Chain, depth: int
    ) -> list[Chain]:
        found: list[list[Chain]] = []
        # Beside a new value, that of an earlier iteration is an old one of the same kind.
        new = [d for d in env[name] if not (isinstance(d.expr, ast.Name) and "@" in d.expr.id)]
        for definition in new or env[name]:
            # A helper's parameter can have the name of what it is handed.
            again = place(definition.expr) == name and definition.env.get(name) in (None, env[name])
            if again or "@" in text(definition.expr) or _adds_up(definition, name):
                found.append([replace(chain, base=expr, base_env=env)])
            else:
                found.append(self.follow(definition.expr, definition.env, chain, depth + 1))
        # By turns, so that no definition is cut off by another.
        return [c for turn in zip_longest(*found) for c in turn if c is not None][:_MAX_CHAINS]

    def _returned_parts(self, expr: ast.Subscript) -> list[tuple[ast.expr, Env]]:
        """Return the parts of the tuples that a followed helper returns: `helper(x)[0]`."""
        index = expr.slice.value if isinstance(expr.slice, ast.Constant) else None
        return [
            (d.expr.elts[index], d.env)
            for d in self.resolver.returns.get(id(expr.value), ())
            if isinstance(d.expr, ast.Tuple) and isinstance(index, int) and index < len(d.expr.elts)
        ]

    def _operation(self, expr: ast.BinOp, env: Env, chain: Chain, depth: int) -> list[Chain]:
        if isinstance(expr.op, (ast.Div, ast.FloorDiv)):
            chain = self._divided(chain, expr.right, expr, env)
            return self.follow(expr.left, env, chain, depth + 1)
        if isinstance(expr.op, ast.Mult):
            loss, factor = self._sides(expr, env)
            chain = replace(self._multiplied(chain, factor, expr, env), weighted=True)
            return self.follow(loss, env, chain, depth + 1)
        if isinstance(expr.op, (ast.Add, ast.Sub)):
            return self._each([(expr.left, env), (expr.right, env)], chain, depth)
        return [replace(chain, base=expr, base_env=env)]

    def _sides(self, expr: ast.BinOp, env: Env) -> tuple[ast.expr, ast.expr]:
        """Return the loss and the factor of a product: a setting that never changes is no loss."""
        loss, factor = _loss_side(expr.left, expr.right)
        if not _LOSSY.search(text(loss)) and not any(isinstance(n, ast.Call) for n in walk(loss)):
            changes = [
                self.resolver.symbols_in(self.resolver.resolve(e, env)) for e in (loss, factor)
            ]
            if changes[1] and not changes[0]:
                return factor, loss
        return loss, factor

    def _call(self, expr: ast.Call, env: Env, chain: Chain, depth: int) -> list[Chain]:
        scaled = self._scaled(expr, env, chain)
        if scaled is not None:
            return self.follow(scaled[0], env, scaled[1], depth + 1)
        returned = self.resolver.returns.get(id(expr))
        if returned:
            return self._each([(_loss_part(d.expr), d.env) for d in returned], chain, depth)
        inner = _loss_inside(expr)
        if inner is not None:
            reduces = last_part(expr.func)
            if (dotted(expr.func) or "").startswith("tf."):
                reduces = reduces.removeprefix("reduce_")
            chain = replace(chain, reducers=chain.reducers | ({reduces} & _REDUCERS))
            return self.follow(inner, env, chain, depth + 1)
        if dotted(expr.func) == "sum" and len(expr.args) == 1:
            return self.follow(expr.args[0], env, chain, depth + 1)
        if last_part(expr.func) == "values" and isinstance(expr.func, ast.Attribute):
            return self.follow(expr.func.value, env, chain, depth + 1)
        return self._computed(expr, env, chain, depth)

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
        resolved = strip_casts(self.resolver.resolve(by, env))
        key = re.sub(r"@\d+", "", text(resolved))
        elementwise = not chain.reducers.isdisjoint({"mean", "sum"})
        divisor = Divisor(resolved, node, key, by, env, elementwise)
        return replace(chain, divisors=(*chain.divisors, divisor))

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


def _is_mask(index: ast.expr) -> bool:
    index = index.operand if isinstance(index, ast.UnaryOp) else index
    return isinstance(index, ast.Compare) or "mask" in (dotted(index) or "")


def _adds_up(definition: Def, name: str) -> bool:
    """True for `total += loss` in a loop that `total` was set before, as a helper can do it."""
    before = [len(d.loops) for d in definition.env.get(name, ())]
    adds = is_binary(definition.expr, ast.Add) and hasattr(definition.expr, "augmented")
    return adds and bool(before) and min(before) < len(definition.loops)


def _loss_inside(call: ast.Call) -> ast.expr | None:
    """Return the loss of a call that only moves, scales or reduces it: `loss.mean()`."""
    name = last_part(call.func)
    first = call.args[0] if call.args else None
    if _OVER_RANKS.search(name) and first is not None and len(call.args) <= 2:
        return first
    if (name in {"scale", "scale_loss"} and first is not None) or dotted(call.func) in _OF_TORCH:
        return first
    if isinstance(call.func, ast.Attribute) and name in _THROUGH:
        return call.func.value if dotted(call.func.value) != "torch" else None
    return None


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
    left_is_loss, right_is_loss = (
        bool(_LOSSY.search(_WEIGHT.sub("", text(side)))) for side in (left, right)
    )
    return (right, left) if right_is_loss and not left_is_loss else (left, right)


def _reciprocal(expr: ast.expr) -> ast.expr | None:
    if is_binary(expr, ast.Div) and number(expr.left) == 1:
        return expr.right
    return None
