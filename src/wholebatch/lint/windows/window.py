"""The window of a loop: its number of micro-batches, its boundary, and when its events happen."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property

from ..normalise import Condition, Event, Loop, NormalFile
from ..normalise.file_index import parameters
from ..normalise.syntax import (
    dotted,
    is_accumulation_name,
    is_call,
    last_part,
    names_in,
    number,
    shown,
    strip_casts,
    text,
)
from .boundary import Boundary, boundary_of
from .loss_terms import DEVICES, Divisor, Term, says_accumulating, terms_of
from .values import integer, iterated, leaves, symbols_in, varies

# A condition that may be a boundary of another file: `if self.should_update():`.
_MAY_WAIT = re.compile(r"(update|step|sync|accum|boundary)\w*\(", re.I)
# What holds the reduction of DDP or FSDP until the last micro-batch of a window.
_HOLDS_SYNC = {"no_sync", "no_backward_sync"}
# Iterables without an end, and numbers of iterations that are those of an epoch.
_ENDLESS = ("cycle", "infinite", "endless", "repeat", "islice", "count(", "forever", "inf_")
_PER_EPOCH = ("len(", "num_batches", "s_per_epoch", "it_per_epoch")


@dataclass(eq=False)
class Window:
    """One training loop. `shape` says how its windows end.

    The shapes are boundary (a condition on a counter), nested (an inner loop over the
    micro-batches), accelerate, plain (an update for every batch: nothing is accumulated), and
    last_only (the backward is at the boundary too: only the last micro-batch of a window has one).
    """

    file: NormalFile
    loop: Loop
    shape: str
    events: list[Event]  # Inside the loop.
    before: list[Event]
    after: list[Event]
    inner: list[Event]  # Its own backwards, not those of a window inside.
    boundary: Boundary | None = None
    every: ast.expr | None = None  # The number of micro-batches of a window.
    _when: dict[Event, str] = field(default_factory=dict)
    _boundaries: dict[Condition, Boundary | None] = field(default_factory=dict)

    def shaped(
        self, shape: str, *, every: ast.expr | None = None, boundary: Boundary | None = None
    ) -> Window:
        """Return the window with another shape: what was concluded before holds no longer."""
        near = (self.events, self.before, self.after, self.inner)
        return Window(self.file, self.loop, shape, *near, boundary, every)

    @property
    def accumulates(self) -> bool:
        """True if the gradients of several micro-batches are meant to add up here."""
        return self.shape not in {"plain", "last_only"}

    @cached_property
    def every_key(self) -> str:
        """Return the number of micro-batches as comparable text, or "" if unknown."""
        return text(self.every)

    @cached_property
    def size(self) -> int | None:
        """Return the number of micro-batches of a window if it is a literal, else None."""
        return integer(self.every, self.file)

    @property
    def level(self) -> str:
        """Return the level of a mistake that a window of one micro-batch does not have."""
        ones = [leaf for leaf in leaves(self.every, self.file) if number(leaf) == 1]
        return "note" if ones else "error"

    @property
    def changes_size(self) -> bool:
        """True if the loop changes the number of micro-batches per update."""
        return varies(self.every, self.loop, self.file)

    @cached_property
    def count_name(self) -> str:
        """Return the number of micro-batches for messages: as the user wrote it, or in words."""
        names = [] if self.boundary is None else [self.boundary.written]
        divisors = [d for _, term in self.terms for d in term.divisors if self.counts(d)]
        names += [d.written for d in divisors if not d.written.isdigit()]
        name = next(filter(None, names), shown(self.every))
        return f"`{name}`" if name else "the number of micro-batches"

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds inside the loop, in order."""
        return [e for e in self.events if e.kind in kinds]

    # -- conditions --------------------------------------------------------------------------

    def when(self, event: Event) -> str:
        """Return how often an event happens: always, boundary, inside, sometimes, outside or never.

        "inside" is every micro-batch but the last; "outside" is after the loop.
        """
        if event not in self._when:
            self._when[event] = self._classify(event)
        return self._when[event]

    def boundary_of(self, condition: Condition) -> Boundary | None:
        """Return the boundary that a condition stands for, or None."""
        if condition not in self._boundaries:
            self._boundaries[condition] = boundary_of(condition, self.loop, self.file)
        return self._boundaries[condition]

    def _classify(self, event: Event) -> str:
        if self.loop not in event.path:
            return "outside"
        sometimes = False
        ours: set[str] = set()
        # If nothing asks Accelerate to accumulate, `sync_gradients` is always true.
        always_syncs = self.shape == "boundary" and not self.asks_to_accumulate
        for condition in event.conditions(self.loop):
            boundary = self.boundary_of(condition)
            accumulating = says_accumulating(condition.test, self.every_key)
            if boundary is None and accumulating is (not condition.positive):
                return "never"  # The branch without accumulation: `if k == 1`.
            if boundary is not None and boundary.kind == "accelerate" and always_syncs:
                continue
            if boundary is not None and self._is_ours(boundary):
                ours.add("inside" if boundary.inverse else "boundary")
            elif condition.origin == "except" or (
                condition.origin == "if" and self.may_wait(condition)
            ):
                sometimes = True
        if ours:
            return ours.pop() if len(ours) == 1 else "never"
        if sometimes and event.kind in {"clip", "step"} and self._is_beside_backward(event):
            return "always"  # Whenever there is a gradient.
        return "sometimes" if sometimes else "always"

    def _is_beside_backward(self, event: Event) -> bool:
        """True if an event has only the conditions of a backward of this loop."""
        mine = event.keys(self.loop)
        return any(mine <= backward.keys(self.loop) for backward in self.inner)

    def _is_ours(self, boundary: Boundary) -> bool:
        """True if a condition ends these windows and is not, say, a logging interval."""
        if boundary.kind == "accelerate":
            return True
        if self.shape == "accelerate" or self.boundary is None:
            return is_accumulation_name(f"{boundary.key} {boundary.written}")
        return boundary.key == self.every_key

    def may_wait(self, condition: Condition) -> bool:
        """True if a condition can differ between two micro-batches."""
        changing = varies(condition.test, self.loop, self.file)
        return changing or bool(_MAY_WAIT.search(text(condition.test)))

    # -- the loss ----------------------------------------------------------------------------

    @cached_property
    def backwards(self) -> list[Event]:
        """Return the backward calls that add to the window."""
        return [e for e in self.inner if self.when(e) != "never"]

    @cached_property
    def terms(self) -> list[tuple[Event, Term]]:
        """Return every pair of a backward and a term of its loss."""
        return [(event, term) for event in self.backwards for term in terms_of(event, self.file)]

    def counts(self, divisor: Divisor) -> bool:
        """True if a divisor of the loss is the number of micro-batches of a window."""
        if is_accumulation_name(f"{divisor.written} {divisor.key}"):
            return True
        if self.every_key and self.every_key == divisor.key:
            return True
        if self.shape not in {"nested", "plain"}:
            return False
        if is_call(divisor.expr, "len") and divisor.expr.args:
            # `for part in parts: (loss / len(parts)).backward()`
            over = iterated(self.loop, self.file)
            parts = self.file.value(divisor.expr.args[0])
            return over is not None and text(self.file.value(over)) == text(parts)
        return self.size is not None and integer(divisor.expr, self.file) == self.size

    def is_own(self, divisor: Divisor) -> bool:
        """True if a divisor is a size of the micro-batch itself, and no count of micro-batches."""
        if not varies(divisor.expr, self.loop, self.file):
            return False
        target, over = self.loop.target, text(self.loop.iterable)
        index = target.elts[0] if isinstance(target, ast.Tuple) else target
        is_index = "enumerate(" in over or "range(" in over
        for symbol in symbols_in(divisor.expr, self.file):
            if symbol.loops and symbol.loop is self.loop:
                counted = (is_index and symbol.name == dotted(index)) or self.loop.virtual
                if symbol.kind == "carried" or (symbol.kind == "target" and counted):
                    return False
        return True

    def is_unrelated(self, divisor: Divisor) -> bool:
        """True if a divisor is a number of devices or written as a literal."""
        return bool(DEVICES.search(divisor.key)) or number(divisor.expr) is not None

    @cached_property
    def is_by_hand(self) -> bool:
        """True if the loop reads gradients: what becomes of them is then not seen."""
        return any(e.kind == "by_hand" for e in (*self.events, *self.after))

    @cached_property
    def rescaled_by(self) -> list[str]:
        """Return what the gradients themselves are multiplied or divided by, as text."""
        events = [e for e in (*self.events, *self.after) if e.kind == "rescale"]
        factors = [text(e.argument and strip_casts(e.argument)) for e in events]
        return [factor for factor in factors if not DEVICES.search(factor)]

    # -- Accelerate --------------------------------------------------------------------------

    @property
    def asks_to_accumulate(self) -> bool:
        """True if the file asks Accelerate to accumulate anywhere."""
        switches = {"accumulate", "_set_sync_gradients"}
        return not switches.isdisjoint(self.file.index.calls_by_name)

    @cached_property
    def accelerator(self) -> ast.Call | None:
        """Return the call that creates the Accelerator, if it is in this file."""
        calls = self.file.index.calls_by_name.get("Accelerator", [])
        # Several branches may create one: take that which is given the number of steps.
        told = [c for c in calls if any(k.arg == "gradient_accumulation_steps" for k in c.keywords)]
        return next(iter((*told, *calls)), None)

    @cached_property
    def accelerator_divides(self) -> bool | None:
        """True if Accelerate divides the loss, False if not, None if the file does not show it."""
        call = self.accelerator
        if call is None:
            return None
        options = {k.arg: k.value for k in call.keywords}
        steps = options.get("gradient_accumulation_steps")
        if steps is not None:
            return number(steps) != 1
        if "gradient_accumulation_plugin" in options:
            return True
        return None if None in options or "deepspeed_plugin" in options else False

    # -- the end of the loop -----------------------------------------------------------------

    @cached_property
    def finite(self) -> bool:
        """True if the loop runs over something that ends every epoch."""
        over = iterated(self.loop, self.file)
        if over is None:
            # Lightning calls the step function with an index that restarts every epoch. A `while`
            # loop whose boundary knows the last micro-batch has one.
            if isinstance(self.loop.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return "batch_idx" in parameters(self.loop.node)
            return self.boundary is not None and self.boundary.tail
        spelled = f"{text(over)} {text(self.file.value(over))[:400]}"
        if any(word in spelled.lower() for word in _ENDLESS):
            return False
        # `range(0, n, bptt)` goes through the data once, in pieces.
        strides = is_call(over, "range") and len(over.args) == 3
        counted = "range(" in spelled and not any(word in spelled for word in _PER_EPOCH)
        return strides or not counted

    @property
    def is_per_epoch(self) -> bool:
        """True if a loop around it, or its function's name, says that it runs once per epoch."""
        function = self.loop.function
        words = [] if function is None else [function.name, *parameters(function)]
        return bool(self.loop.parents) or any("epoch" in word for word in words)

    def steps_after(self) -> list[Event]:
        """Return the optimizer steps after an inner loop."""
        return [e for e in self.after if e.kind == "step" and self.is_beside(e)]

    def is_beside(self, event: Event) -> bool:
        """True if an event is in the same iteration of the outer loops as this inner loop."""
        loops, parents = event.loops, self.loop.parents
        # `for optimizer in optimizers: optimizer.step()`
        return loops == parents or (
            event.kind in {"step", "clear"}
            and loops[: len(parents)] == parents
            and all(last_part(inner.target).startswith("opt") for inner in loops[len(parents) :])
        )

    def closing_steps(self) -> list[Event]:
        """Return the optimizer steps that close the window: at the boundary or after the loop."""
        if self.shape == "nested":
            return self.steps_after()
        wanted = {"always", "boundary"} if self.shape in {"plain", "accelerate"} else {"boundary"}
        return [e for e in self.of("step") if self.when(e) in wanted]


def is_optimizer_of(clear: Event, steps: list[Event]) -> bool:
    """True if a `zero_grad` clears what these steps use: the same optimizer, or the whole model."""
    names = {s.owner for s in steps}
    is_optimizer = "opt" in clear.owner.lower()
    return clear.owner in names - {""} or (len(names) == 1 and not is_optimizer)


def names_behind(expr: ast.expr | None, file: NormalFile) -> set[str]:
    """Return the names in an expression, and in what its own symbols stand for."""
    if expr is None:
        return set()
    values = [symbol.value for symbol in symbols_in(expr, file) if symbol.value is not None]
    return set(names_in(expr, *values))


def is_held(event: Event, loop: Loop, file: NormalFile) -> bool:
    """True if an event is, or may be, under a `no_sync()` inside a loop."""
    return any(_HOLDS_SYNC & names_behind(context, file) for context in event.contexts(loop))
