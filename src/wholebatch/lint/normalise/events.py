"""The normal form of a file: a flat list of events, each with the path that leads to it.

An event is a call that matters to training. Its path is the loops, conditions and `with` items
around it, outermost first, also those around the helpers that were inlined. Every question of a
rule ("is this clip under the boundary?") is a question about such paths.

The kinds of events are backward, step, clear, clip, unscale, schedule, rescale (of gradients),
by_hand (gradients are read or changed otherwise) and call (any other).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from .syntax import FUNCTIONS, FunctionNode, is_not, names_in, text


@dataclass(eq=False)
class Loop:
    """A loop, or the body of a step function that a framework calls once per micro-batch."""

    node: ast.For | ast.AsyncFor | ast.While | FunctionNode
    number: int
    parents: tuple[Loop, ...]
    function: FunctionNode | None  # In whose text it stands.
    target: ast.expr | None = None
    iterable: ast.expr | None = None
    # Values at the end of an iteration, in terms of those at its beginning.
    after: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def virtual(self) -> bool:
        """True if the loop itself is elsewhere and only its body is in this file."""
        return isinstance(self.node, FUNCTIONS)


@dataclass(frozen=True, eq=False)
class Condition:
    """A condition on the path; `origin` is "if", "skip" (by `continue`), "break" or "except"."""

    test: ast.expr
    positive: bool
    origin: str = "if"

    @cached_property
    def key(self) -> tuple[str, bool]:
        """Return the condition as text, and its sign."""
        return text(self.test), self.positive

    @cached_property
    def claims(self) -> set[tuple[str, bool]]:
        """Return what holds on this side: of `a and not b` both parts, each with its sign."""
        claims: set[tuple[str, bool]] = set()
        todo = [(self.test, self.positive)]
        while todo:
            test, positive = todo.pop()
            if is_not(test):
                todo.append((test.operand, not positive))
                continue
            claims.add((text(test), positive))
            if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is positive:
                todo += [(value, positive) for value in test.values]
        return claims


@dataclass(frozen=True, eq=False)
class Context:
    """A `with` item on the path."""

    expr: ast.expr


PathItem = Loop | Condition | Context


@dataclass(frozen=True, eq=False)
class Symbol:
    """One value of a name, written `name@7`.

    The kinds are "carried" (changed by the loop's body; `value` is what it was before the loop),
    "target" (the loop's own) and "set" (assigned; `value` is what it was set to).
    """

    name: str
    kind: str
    loops: tuple[Loop, ...]
    value: ast.expr | None = None

    @property
    def loop(self) -> Loop:
        """Return the loop that changes it: the innermost one."""
        return self.loops[-1]


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of one call on training; receiver and argument are in normal form."""

    kind: str
    receiver: ast.expr | None = None
    argument: ast.expr | None = None
    detail: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Event(Effect):
    """An effect, with its place in the file and its path."""

    node: ast.AST
    path: tuple[PathItem, ...]
    order: int
    root: int  # The function whose walk came here: events of two walks are unrelated.

    @cached_property
    def owner(self) -> str:
        """Return the receiver as text."""
        return text(self.receiver)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Return the loops around the event, outermost first."""
        return tuple(item for item in self.path if isinstance(item, Loop))

    def inside(self, loop: Loop) -> tuple[PathItem, ...]:
        """Return the path between a loop and the event."""
        return self.path[self.path.index(loop) + 1 :] if loop in self.path else ()

    @cached_property
    def claims(self) -> set[tuple[str, bool]]:
        """Return what holds wherever the event happens."""
        return {c for item in self.path if isinstance(item, Condition) for c in item.claims}

    def excludes(self, other: Event) -> bool:
        """True if the two are on opposite branches of one condition."""
        return any((spelled, not positive) in self.claims for spelled, positive in other.claims)

    def conditions(self, loop: Loop) -> list[Condition]:
        """Return the conditions between a loop and the event."""
        return [item for item in self.inside(loop) if isinstance(item, Condition)]

    def keys(self, loop: Loop | None = None) -> set[tuple[str, bool]]:
        """Return the conditions on the path, or those inside a loop, as text."""
        items = self.path if loop is None else self.inside(loop)
        return {item.key for item in items if isinstance(item, Condition)}

    def contexts(self, loop: Loop) -> Iterator[ast.expr]:
        """Yield the `with` items between a loop and the event."""
        yield from (item.expr for item in self.inside(loop) if isinstance(item, Context))

    def in_accumulate_of(self, loop: Loop) -> bool:
        """True if it runs in `with accelerator.accumulate(model)` inside a loop."""
        return any("accumulate" in names_in(context) for context in self.contexts(loop))

    @property
    def in_accumulate(self) -> bool:
        """True if it runs in `with accelerator.accumulate(model)` inside any of its loops."""
        return any(map(self.in_accumulate_of, self.loops))
