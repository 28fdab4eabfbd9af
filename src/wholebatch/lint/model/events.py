"""The values of the model: definitions, loops, guards and events.

A function is walked once and becomes a flat list of events. Each event knows its path: the loops,
conditions and `with` blocks around it, outermost first. Every question of a rule ("is this clip
under the boundary?") is a question about such paths.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = [
    "Context",
    "Def",
    "Env",
    "Event",
    "Guard",
    "Loop",
    "PathItem",
    "Symbol",
]


@dataclass(frozen=True, eq=False)
class Def:
    """One assignment: the expression, its environment, and the loops around it."""

    expr: ast.expr
    env: Env
    loops: tuple[Loop, ...]
    node: ast.AST | None = None


class Env(dict[str, tuple[Def, ...]]):
    """The possible definitions of each name at one place."""

    __slots__ = ("_copy",)

    def __init__(self, names: Mapping[str, tuple[Def, ...]] = MappingProxyType({})) -> None:
        super().__init__(names)
        self._copy: Env | None = None

    def bind(self, name: str, defs: tuple[Def, ...]) -> None:
        """Set the definitions of a name. All changes must go through this method or `replace`."""
        self[name] = defs
        self._copy = None

    def replace(self, names: Mapping[str, tuple[Def, ...]]) -> None:
        """Replace all names with these."""
        self.clear()
        self.update(names)
        self._copy = None

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


@dataclass(frozen=True, eq=False)
class Context:
    """A `with` item on the path."""

    expr: ast.expr
    env: Env
    node: ast.With | ast.AsyncWith


PathItem = Loop | Guard | Context


@dataclass(frozen=True, eq=False)
class Symbol:
    """A name whose value changes from one iteration to the next, written `name@7`."""

    name: str
    loops: tuple[Loop, ...]
    kind: str  # "carried": changed by the body; "target": the loop's own; "opaque": a result
    loop: Loop | None = None
    init: tuple[Def, ...] = ()


@dataclass(frozen=True, eq=False)
class Event:
    """Something relevant to accumulation, with its place and its conditions."""

    kind: str
    node: ast.AST
    stmt: ast.stmt
    path: tuple[PathItem, ...]
    env: Env
    order: int
    receiver: ast.expr | None = None
    receiver_text: str = ""
    argument: ast.expr | None = None
    detail: str = ""

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Return the loops around the event, outermost first."""
        return tuple(item for item in self.path if isinstance(item, Loop))

    @property
    def line(self) -> int:
        """Return the source line, counted from 1."""
        return int(getattr(self.node, "lineno", 1))

    @property
    def column(self) -> int:
        """Return the source column, counted from 1."""
        return int(getattr(self.node, "col_offset", 0)) + 1

    def inside(self, loop: Loop) -> tuple[PathItem, ...]:
        """Return the path between a loop and the event."""
        return self.path[self.path.index(loop) + 1 :] if loop in self.path else ()
