"""The values of the model: definitions, loops, conditions and events.

A function is walked once and becomes a flat list of events. Each event knows its path: the loops,
conditions and `with` blocks around it, outermost first. Every question of a rule ("is this clip
under the boundary?") is a question about such paths.

The kinds of events are backward, step, clear, clip, unscale, schedule, forward, engine_step,
rescale (of gradients), hold_sync (of DDP's reduction), freeze (of BatchNorm), and, for what is
logged and computed, call, assign and augment.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from .expressions import dotted, names_in, text


@dataclass(frozen=True, eq=False)
class Definition:
    """One assignment: the expression, its environment, and the loops around it."""

    expr: ast.expr
    env: Env
    loops: tuple[Loop, ...]
    node: ast.AST | None = None


class Env(dict[str, tuple[Definition, ...]]):
    """The possible definitions of each name at one place, in one call of its function."""

    __slots__ = ("_copy", "changed", "frame")

    def __init__(
        self, names: Mapping[str, tuple[Definition, ...]] = MappingProxyType({}), frame: int = 0
    ) -> None:
        super().__init__(names)
        self._copy: Env | None = None
        self.changed: set[str] = set()  # Since this state was copied from another.
        self.frame = frame or getattr(names, "frame", 0)  # The call that is followed here.

    def bind(self, name: str, defs: tuple[Definition, ...]) -> None:
        """Set the definitions of a name. All changes must go through this method."""
        self[name] = defs
        self.changed.add(name)
        self._copy = None

    def drop(self, prefix: str) -> None:
        """Forget the slots of an object that was replaced: `state['loss']['total']`."""
        for name in [n for n in self if n.startswith(prefix)]:
            self.bind(name, ())

    def frozen(self) -> Env:
        """Return a copy of the present state. The copy is shared until the next change."""
        if self._copy is None:
            self._copy = Env(self)
        return self._copy


@dataclass(eq=False)
class Loop:
    """A loop, or the body of a step function that a framework calls once per micro-batch."""

    node: ast.For | ast.AsyncFor | ast.While | ast.FunctionDef | ast.AsyncFunctionDef
    entry: Env
    parents: tuple[Loop, ...]
    target: ast.expr | None = None
    iterable: ast.expr | None = None
    exit: Env = field(default_factory=lambda: Env())
    carried: set[str] = field(default_factory=set)

    @property
    def virtual(self) -> bool:
        """True if the loop itself is elsewhere and only its body is in this file."""
        return isinstance(self.node, (ast.FunctionDef, ast.AsyncFunctionDef))


@dataclass(frozen=True, eq=False)
class Guard:
    """A condition on the path; `origin` is "if", "skip" (by `continue`), "break" or "except"."""

    expr: ast.expr
    env: Env
    positive: bool
    origin: str = "if"

    @cached_property
    def key(self) -> tuple[str, bool]:
        """Return the condition as text, and its sign: equal for two spellings of one setting."""
        return text(self.expr), self.positive

    @cached_property
    def claims(self) -> set[tuple[str, bool]]:
        """Return what holds on this side: of `a and not b` both parts, each with its sign."""
        claims: set[tuple[str, bool]] = set()
        todo = [(self.expr, self.positive)]
        while todo:
            expr, positive = todo.pop()
            if isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.Not):
                todo.append((expr.operand, not positive))
                continue
            claims.add((text(expr), positive))
            if isinstance(expr, ast.BoolOp) and isinstance(expr.op, ast.And) is positive:
                todo += [(value, positive) for value in expr.values]
        return claims


@dataclass(frozen=True, eq=False)
class Context:
    """A `with` item on the path."""

    expr: ast.expr
    env: Env
    node: ast.With | ast.AsyncWith

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names in the item, and in what its own name stands for."""
        name = dotted(getattr(self.expr, "func", self.expr)) or ""
        return names_in(self.expr, *(d.expr for d in self.env.get(name, ())))


PathItem = Loop | Guard | Context


@dataclass(frozen=True, eq=False)
class Symbol:
    """A name whose value changes from one iteration to the next, written `name@7`."""

    name: str
    loops: tuple[Loop, ...]
    kind: str  # "carried": changed by the body; "target": the loop's own; "opaque": a result
    loop: Loop | None = None
    init: tuple[Definition, ...] = ()


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of one call."""

    kind: str
    receiver: ast.expr | None = None
    argument: ast.expr | None = None
    detail: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Event(Effect):
    """An effect, with its place in the file and its conditions."""

    node: ast.AST
    stmt: ast.stmt
    path: tuple[PathItem, ...]
    env: Env
    order: int
    root: int  # The function whose walk came here: events of two walks are unrelated.
    receiver_text: str = ""

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Return the loops around the event, outermost first."""
        return tuple(item for item in self.path if isinstance(item, Loop))

    @property
    def line(self) -> int:
        """Return the source line, counted from 1."""
        return int(getattr(self.node, "lineno", 1))

    def inside(self, loop: Loop) -> tuple[PathItem, ...]:
        """Return the path between a loop and the event."""
        return self.path[self.path.index(loop) + 1 :] if loop in self.path else ()

    def excludes(self, other: Event) -> bool:
        """True if the two are on opposite branches of one condition."""
        mine = {c for g in self.path if isinstance(g, Guard) for c in g.claims}
        theirs = [c for g in other.path if isinstance(g, Guard) for c in g.claims]
        return any((spelled, not positive) in mine for spelled, positive in theirs)

    def conditions(self, loop: Loop) -> set[tuple[str, bool]]:
        """Return the conditions between a loop and the event, as text."""
        return {guard.key for guard in self.guards(loop)}

    def guards(self, loop: Loop) -> list[Guard]:
        """Return the conditions between a loop and the event."""
        return [item for item in self.inside(loop) if isinstance(item, Guard)]

    def contexts(self, loop: Loop) -> list[Context]:
        """Return the `with` items between a loop and the event."""
        return [item for item in self.inside(loop) if isinstance(item, Context)]
