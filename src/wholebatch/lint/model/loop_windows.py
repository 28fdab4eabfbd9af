"""The window of a loop: its number of micro-batches, its boundary, and when its events happen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from .events import Env, Event, Guard, Loop
from .expressions import (
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    names_in,
    number,
    text,
    without_marks,
)
from .file_facts import Facts
from .loss_origin import Chain, Divisor, trace
from .name_resolution import Resolver
from .surroundings import Surroundings
from .window_boundary import Boundary, iterated, of_guard, says_accumulating

# A condition that may be a boundary of another file: `if self.should_update():`.
_MAY_WAIT = re.compile(r"(update|step|sync|accum|boundary)\w*\(", re.I)
# Iterables without an end, and numbers of iterations that are those of an epoch.
_ENDLESS = ("cycle", "infinite", "repeat", "islice", "count(", "forever", "yield_", "inf_")
_PER_EPOCH = ("len(", "num_batches", "s_per_epoch", "it_per_epoch")
_MOVES = ("to", "cuda", "float", "long", "contiguous", "view", "reshape", "flatten")


@dataclass(eq=False)
class LoopWindow:
    """One training loop. `shape` says how its windows end.

    The shapes are boundary (a condition on a counter), nested (an inner loop over the
    micro-batches), accelerate, deepspeed, plain (an update for every batch: nothing is
    accumulated), and last_only (the backward is at the boundary too: only the last micro-batch
    of a window has one).
    """

    loop: Loop
    shape: str
    events: list[Event]
    before: list[Event]
    after: list[Event]
    resolver: Resolver
    facts: Facts
    # Its own backwards, not those of a window inside.
    inner: list[Event]
    around: Surroundings
    is_frozen: bool = False  # BatchNorm is frozen before the loop or in it.
    boundary: Boundary | None = None
    every: ast.expr | None = None
    _when: dict[Event, str] = field(default_factory=dict)
    _boundaries: dict[Guard, Boundary | None] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """True if the gradients of several micro-batches are meant to add up here."""
        return self.shape not in {"plain", "last_only"}

    @cached_property
    def every_key(self) -> str:
        """Return the number of micro-batches as comparable text, or "" if unknown."""
        return "" if self.every is None else text(self.every)

    @property
    def every_name(self) -> str:
        """Return the number of micro-batches without marks of symbols, or "" if unknown."""
        return without_marks(self.every_key)

    @property
    def changes_size(self) -> bool:
        """True if the loop changes the number of micro-batches per update."""
        return self.every is not None and self.resolver.varies(self.every, self.loop)

    @cached_property
    def count_name(self) -> str:
        """Return the number of micro-batches for messages: as the user wrote it, or in words."""
        tests = [] if self.boundary is None else ast.walk(self.boundary.expr)
        names = [text(n.right) for n in tests if is_binary(n, ast.Mod) and dotted(n.right)]
        divisors = [d for _, chain in self.chains for d in chain.divisors if self.counts(d)]
        names += [d.written for d in divisors if number(d.by) is None]
        name = next(iter(names), self.every_name)
        return f"`{name}`" if name else "the number of micro-batches"

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds inside the loop, in order."""
        return [e for e in self.events if e.kind in kinds]

    def when(self, event: Event) -> str:
        """Return how often an event happens: always, boundary, inside, sometimes, outside or never.

        "inside" is every micro-batch but the last; "outside" is after the loop.
        """
        if event not in self._when:
            self._when[event] = self._classify(event)
        return self._when[event]

    def end_every(self, every: ast.expr | None, shape: str, boundary: Boundary | None) -> None:
        """Set how the windows end, and drop the conclusions made before this was known."""
        self.every, self.shape, self.boundary = every, shape, boundary
        self._when.clear()
        self.__dict__.pop("every_key", None)

    def ends_window(self, event: Event) -> bool:
        """True if an event waits for the boundary, in whatever mode of the loop it is."""
        return any(self.is_ours(end) and not end.inverse for end in self.boundaries(event))

    def boundaries(self, event: Event) -> Iterator[Boundary]:
        """Yield the boundaries among the conditions of an event, outermost first."""
        yield from filter(None, map(self.boundary_of, event.guards(self.loop)))

    def boundary_of(self, guard: Guard) -> Boundary | None:
        """Return the boundary that a condition of the loop stands for, or None."""
        if guard not in self._boundaries:
            self._boundaries[guard] = of_guard(guard, self.loop, self.resolver)
        return self._boundaries[guard]

    def _classify(self, event: Event) -> str:
        if self.loop not in event.path:
            return "outside"
        sometimes = False
        ours: set[str] = set()
        # If nothing asks Accelerate to accumulate, `sync_gradients` is always true.
        always_syncs = self.shape == "boundary" and "accumulate" not in self.around.calls
        for guard in event.guards(self.loop):
            boundary = self.boundary_of(guard)
            if boundary is None and self._without_accumulation(guard):
                return "never"
            if boundary is not None and boundary.kind == "accelerate" and always_syncs:
                continue
            if boundary is not None and self.is_ours(boundary):
                ours.add("inside" if boundary.inverse else "boundary")
            elif guard.origin == "except" or (guard.origin == "if" and self.may_wait(guard)):
                sometimes = True
        if ours:
            return ours.pop() if len(ours) == 1 else "never"
        if sometimes and event.kind in {"clip", "step"} and self.is_beside_backward(event):
            return "always"  # Whenever there is a gradient.
        return "sometimes" if sometimes else "always"

    def is_beside_backward(self, event: Event) -> bool:
        """True if an event has only the conditions of a backward of this loop."""
        mine = event.conditions(self.loop)
        return any(mine <= backward.conditions(self.loop) for backward in self.inner)

    def is_ours(self, boundary: Boundary) -> bool:
        """True if a condition ends these windows and is not, say, a logging interval."""
        if boundary.kind == "accelerate":
            return True
        if self.shape == "accelerate" or self.boundary is None:
            return is_accumulation_name(boundary.key)
        return boundary.key == self.every_key

    def _without_accumulation(self, guard: Guard) -> bool:
        """True if this is the branch without accumulation (`if k == 1`)."""
        accumulating = says_accumulating(
            self.resolver.resolve(guard.expr, guard.env), self.every_key
        )
        return accumulating is not None and accumulating != guard.positive

    def may_wait(self, guard: Guard) -> bool:
        """True if a condition can differ between two micro-batches."""
        return self._varies(guard) or bool(_MAY_WAIT.search(text(guard.expr)))

    def _varies(self, guard: Guard) -> bool:
        resolved = self.resolver.resolve(guard.expr, guard.env)
        return self.resolver.varies(resolved, self.loop)

    def counts(self, divisor: Divisor) -> bool:
        """True if a divisor of the loss is the number of micro-batches of a window."""
        over = iterated(self.loop) if self.shape == "nested" else None
        if over is not None and divisor.key == f"len({text(over)})":
            return True  # `for part in parts: (loss / len(parts)).backward()`
        keys = (divisor.key, divisor.whole)
        return is_accumulation_name(divisor.written) or any(map(self.is_count, keys))

    def is_own(self, divisor: Divisor) -> bool:
        """True if a divisor is a size of the micro-batch itself, and no count of micro-batches."""
        target, over = self.loop.target, text(self.loop.iterable)
        index = target.elts[0] if isinstance(target, ast.Tuple) else target
        is_index = "enumerate(" in over or "range(" in over
        counters = self.loop.carried | ({text(index)} if is_index else set())
        mine = [s for s in self.resolver.symbols_in(divisor.expr) if s.loop is self.loop]
        varies = self.resolver.varies(divisor.expr, self.loop)
        return varies and not any(s.name in counters for s in mine)

    def is_count(self, key: str) -> bool:
        """True if a text means the number of micro-batches of a window."""
        return (bool(key) and key == self.every_name) or is_accumulation_name(key)

    @cached_property
    def words(self) -> frozenset[str]:
        """Return the names in the loop itself and in the functions that it calls."""
        return names_in(*self.facts.reached(self.loop.node))

    @cached_property
    def backwards(self) -> list[Event]:
        """Return the backward calls that add to the window."""
        return [e for e in self.inner if self.when(e) != "never"]

    @cached_property
    def chains(self) -> list[tuple[Event, Chain]]:
        """Return every pair of a backward and a derivation of its loss."""
        return [(event, chain) for event in self.backwards for chain in self.ways(event)]

    def ways(self, event: Event) -> list[Chain]:
        """Return the derivations of a backward's loss, without divisions on another branch."""
        # A helper that is followed twice has two events on a line: the last one counts.
        before = [e for e in self.of("assign", "augment") if e.order < event.order]
        last = {e.line: e for e in before}
        places = [
            (c, [getattr(d.node, "lineno", 0) for d in c.divisors])
            for c in trace(event.argument, event.env, self.resolver)
        ]
        return [
            chain
            for chain, lines in places
            if not any(line in last and last[line].excludes(event) for line in lines)
        ]

    def makers(self, name: str, env: Env) -> list[tuple[ast.Call, Env]]:
        """Return the calls that made what a name stands for, here or wherever the file sets it."""
        known = [
            # An attribute was set in another method, which sees its own names.
            (unmoved(d.expr), d.env if d.node is not None else self.facts.env_around(d.expr))
            for d in env.get(name, ())
        ]
        # `optimizer, scheduler = build(...)`
        pairs = [(m.value, w) for m, w in known if isinstance(m, ast.Subscript)]
        if not any(isinstance(built, ast.Call) for built, _ in known):
            values = self.facts.assigned.get(name, ())
            known = [(unmoved(value), self.facts.env_around(value)) for value in values]
        calls = [(built, where) for built, where in known if isinstance(built, ast.Call)]
        return calls + [(built, where) for built, where in pairs if isinstance(built, ast.Call)]

    @cached_property
    def finite(self) -> bool:
        """True if the loop runs over something that ends every epoch."""
        inner = iterated(self.loop)
        if inner is None:
            # Lightning calls the step function with an index that restarts every epoch. A `while`
            # loop whose boundary knows the last micro-batch has one.
            if self.loop.virtual:
                return "batch_idx" in text(self.loop.node.args)  # type: ignore[union-attr]
            return self.boundary is not None and self.boundary.tail
        values = [text(d.expr)[:400] for d in self.loop.entry.get(dotted(inner) or "", ())]
        spelled = [text(inner), *values]
        if any(word in s.lower() for s in spelled for word in _ENDLESS):
            return False
        ranges = [s for s in spelled if "range(" in s]
        # `range(0, n, bptt)` goes through the data once, in pieces.
        strides = is_call(inner, "range") and len(inner.args) == 3
        if not strides and any(not any(word in s for word in _PER_EPOCH) for s in ranges):
            return False
        return not self._left_by_count()

    def _left_by_count(self) -> bool:
        """True if a loop outside of epochs is left after a number of updates: it has no end."""
        if self.loop.parents or not isinstance(self.loop.node, (ast.For, ast.AsyncFor)):
            return False
        around = self.facts.functions_around(self.loop.node.lineno)
        if any("epoch" in f"{f.name} {text(f.args)}" for f in around):
            return False  # Called once per epoch.
        tests = [n for n in ast.walk(self.loop.node) if isinstance(n, ast.If)]
        leaves = [t.test for t in tests if any(isinstance(s, ast.Break) for s in t.body)]
        clocks = [text(t.left) for t in leaves if isinstance(t, ast.Compare)]
        counted = any(word in clock for clock in clocks for word in ("step", "iter", "update"))
        return counted or any(isinstance(t, ast.Name) for t in leaves)  # `if stop: break`


def unmoved(expr: ast.expr) -> ast.expr:
    """Return `CrossEntropyLoss(...)` for `CrossEntropyLoss(...).to(device)`."""
    while is_call(expr, *_MOVES) and isinstance(expr.func, ast.Attribute):
        expr = expr.func.value
    return expr


def steps_after(window: LoopWindow) -> list[Event]:
    """Return the optimizer steps after an inner loop."""
    return [e for e in window.after if e.kind == "step" and e.loops == window.loop.parents]
