"""The windows of a file: the loop that accumulates, its micro-batch count, and its boundary."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from .call_kinds import holds_sync
from .events import Context, Env, Event, Guard, Loop, PathItem
from .expressions import (
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    keyword,
    names_in,
    number,
    text,
    without_marks,
)
from .file_facts import Facts, gather
from .function_walk import Walker, walk_file
from .loss_origin import Chain, Divisor, trace
from .name_resolution import Resolver, strip_casts
from .surroundings import Surroundings
from .window_boundary import Boundary, iterated, of_guard, says_accumulating

_MICRO_NAME = re.compile(r"micro|chunk|split|mini_?batch|sub_?batch|accum", re.I)
# A condition that may be a boundary of another file: `if self.should_update():`.
_MAY_WAIT = re.compile(r"(update|step|sync|accum|boundary)\w*\(", re.I)
# A loop is read with the events around it; the limit keeps long files linear.
_NEAR = 400
# Iterables without an end, and numbers of iterations that are those of an epoch.
_ENDLESS = ("cycle", "infinite", "repeat", "islice", "count(", "forever", "yield_", "inf_")
_PER_EPOCH = ("len(", "num_batches", "s_per_epoch", "it_per_epoch")
_MOVES = ("to", "cuda", "float", "long", "contiguous", "view", "reshape", "flatten")
_FETCH = {"next", "get_batch", "next_batch", "sample_batch", "get_next_batch"}


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

    @cached_property
    def count_name(self) -> str:
        """Return the number of micro-batches for messages: as the user wrote it, or in words."""
        tests = [] if self.boundary is None else ast.walk(self.boundary.expr)
        names = [text(n.right) for n in tests if is_binary(n, ast.Mod) and dotted(n.right)]
        divisors = [d for _, chain in self.chains for d in chain.divisors if self.counts(d)]
        names += [d.written for d in divisors if not d.written.isdigit()]
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
        return any(self.is_ours(found) and not found.inverse for found in self.boundaries(event))

    def boundaries(self, event: Event) -> Iterator[Boundary]:
        """Yield the boundaries among the conditions of an event, outermost first."""
        for guard in event.guards(self.loop):
            found = self.boundary_of(guard)
            if found is not None:
                yield found

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
            found = self.boundary_of(guard)
            if found is None and self._without_accumulation(guard):
                return "never"
            if found is not None and found.kind == "accelerate" and always_syncs:
                continue
            if found is not None and self.is_ours(found):
                ours.add("inside" if found.inverse else "boundary")
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

    def is_ours(self, found: Boundary) -> bool:
        """True if a condition ends these windows and is not, say, a logging interval."""
        if self.shape == "accelerate" or self.boundary is None:
            return found.kind in {"accelerate", "deepspeed"} or is_accumulation_name(found.key)
        if found.kind == "accelerate":
            return True
        return found.key == self.every_key

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
        if not any(isinstance(made, ast.Call) for made, _ in known):
            values = self.facts.assigned.get(name, ())
            known = [(unmoved(value), self.facts.env_around(value)) for value in values]
        calls = [(made, where) for made, where in known if isinstance(made, ast.Call)]
        return calls + [(made, where) for made, where in pairs if isinstance(made, ast.Call)]

    @cached_property
    def finite(self) -> bool:
        """True if the loop runs over something that ends every epoch."""
        inner = iterated(self.loop)
        if inner is None:
            # Lightning calls the step function with an index that restarts every epoch.
            return self.loop.virtual and "batch_idx" in text(self.loop.node.args)  # type: ignore[union-attr]
        made = [text(d.expr)[:400] for d in self.loop.entry.get(dotted(inner) or "", ())]
        spelled = [text(inner), *made]
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


def unmoved(made: ast.expr) -> ast.expr:
    """Return `CrossEntropyLoss(...)` for `CrossEntropyLoss(...).to(device)`."""
    while is_call(made, *_MOVES) and isinstance(made.func, ast.Attribute):
        made = made.func.value
    return made


@dataclass(eq=False)
class File:
    """A file as the rules see it."""

    facts: Facts
    windows: list[LoopWindow]
    unread: list[LoopWindow]  # Loops with a backward whose windows are not understood.
    _walk: Walker

    @property
    def accumulating(self) -> list[LoopWindow]:
        """Return the windows that accumulate the gradients of several micro-batches."""
        return [w for w in self.windows if w.accumulates]

    def events(self, kind: str) -> list[Event]:
        """Return the events of a kind, wherever they are."""
        return [e for e in self._walk.events if e.kind == kind]

    def shaped(self, *shapes: str) -> list[LoopWindow]:
        """Return the windows of these shapes."""
        return [w for w in self.windows if w.shape in shapes]


def read(source: str) -> File:
    """Parse and model one file; raise SyntaxError as Python does."""
    with warnings.catch_warnings():
        # Ignore warnings about invalid escapes in the file's strings.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    facts = gather(tree)
    walker = walk_file(tree, facts)
    return File(facts, *find_windows(walker, facts), walker)


def find_windows(walker: Walker, facts: Facts) -> tuple[list[LoopWindow], list[LoopWindow]]:
    """Return the training loops of the file that are understood, and the others."""
    inside: dict[Loop, list[Event]] = {}
    for event in walker.events:
        for loop in event.loops:
            inside.setdefault(loop, []).append(event)
    freezes = [e for e in walker.events if e.kind == "freeze"]
    surroundings: dict[int, Surroundings] = {}
    understood: list[LoopWindow] = []
    unread: dict[Loop, LoopWindow] = {}
    # Inner loops first: a loop inside that is not read as a window is a part of one micro-batch.
    for loop in sorted(walker.loops, key=lambda loop: -len(loop.parents)):
        events = inside.get(loop, [])
        # The innermost loop around a backward iterates over micro-batches.
        inner = [e for e in events if e.kind == "backward" and _within(e, loop, unread)]
        if not inner:
            continue
        first, last = events[0].order, events[-1].order
        root, parents = events[0].root, loop.parents
        if root not in surroundings:
            surroundings[root] = Surroundings(walker.roots[root], facts)
        near = walker.events[max(0, first - _NEAR) : first]
        before = [e for e in near if e.loops == parents and e.root == root]
        near = walker.events[last + 1 : last + _NEAR]
        after = [e for e in near if e.root == root]
        if parents:  # After an outer loop too.
            after = [e for e in after if e.loops[: len(parents)] == parents[: len(e.loops)]]
        window = LoopWindow(
            loop=loop,
            shape="plain",
            events=events,
            before=before,
            after=after,
            resolver=walker.resolver,
            facts=facts,
            inner=inner,
            around=surroundings[root],
            is_frozen=any(e.root == root and e.order <= last for e in freezes),
        )
        if _decide(window, inner, {w.loop for w in understood}):
            understood.append(window)
        else:
            unread[loop] = window
    # A step function whose loop is in this file was read there, with what its caller does.
    read = {id(e.node) for w in understood if not w.loop.virtual for e in w.inner}
    kept = [w for w in understood if not w.loop.virtual or id(w.inner[0].node) not in read]
    return sorted(kept, key=lambda window: window.events[0].order), list(unread.values())


def _within(event: Event, loop: Loop, unread: Container[Loop]) -> bool:
    """True if only loops that are no windows lie between a loop and an event."""
    return all(between in unread for between in event.loops[event.loops.index(loop) + 1 :])


def _decide(window: LoopWindow, inner: list[Event], read: set[Loop]) -> bool:
    if _accelerate(window, inner) or _deepspeed(window, inner):
        return True
    # A window inside has steps of its own.
    steps = [e for e in window.of("step") if read.isdisjoint(e.loops)]
    # A closure, or a loop inside one micro-batch of Accelerate's.
    if any(e.detail == "closure" for e in steps) or any(_in_accumulate(e.path) for e in inner):
        return False
    if steps:
        return _boundary(window, steps, inner)
    return _nested(window)


def _accelerate(window: LoopWindow, inner: list[Event]) -> bool:
    if not any(_in_accumulate(e.inside(window.loop)) for e in inner):
        return False
    if window.around.accelerator_divides is False:
        # `accumulate()` of an Accelerator without a number of steps does nothing.
        return all(window.when(e) == "always" for e in window.of("step"))
    window.shape = "accelerate"
    call = window.around.accelerator
    given = keyword(call, "gradient_accumulation_steps") if call is not None else None
    if given is not None:
        window.every = strip_casts(given)
    return True


def _in_accumulate(path: tuple[PathItem, ...]) -> bool:
    return any(isinstance(item, Context) and "accumulate" in item.names for item in path)


def _deepspeed(window: LoopWindow, inner: list[Event]) -> bool:
    engine_steps = window.of("engine_step")
    engines = {e.receiver_text for e in inner if e.detail in {"deepspeed", "engine"}}
    if not engines or not any(e.receiver_text in engines for e in engine_steps):
        return False
    if any(e.detail in {"tensor", "accelerate"} for e in inner):
        return False
    # The engine's configuration decides whether it accumulates; the file must at least mention it.
    accumulates = bool(window.around.engine_steps) or any(
        "gradient_accumulat" in word or word == "gas" for word in window.around.words
    )
    window.shape = "deepspeed" if accumulates else "plain"
    return accumulates


def _boundary(window: LoopWindow, steps: list[Event], inner: list[Event]) -> bool:
    ends = _ends(window, steps)
    if not ends:
        return all(window.when(e) == "always" for e in steps)
    first = next(iter(ends.values()))
    if any(b.key != first.key for b in ends.values()):
        return False
    window.end_every(first.every, "boundary", first)
    when = {window.when(e) for e in inner}
    if when == {"boundary"}:
        return _has_backward_of_last_only(window)
    # A backward under the same condition as the step is an alternating update, not a window.
    if "boundary" in when and "inside" not in when:
        return False
    if not when & {"always", "inside", "sometimes"}:
        return False
    # Another step on every micro-batch: several optimizers, or a loop we do not understand.
    # But `if accum == 1: step() elif boundary: step()` is one optimizer with two spellings.
    if any(window.when(e) == "inside" for e in steps):
        return False  # Two optimizers in turn.
    others = [e for e in steps if e not in ends and window.when(e) == "always"]
    apart = [e for e in others if all(e.excludes(end) for end in ends)]
    others = [e for e in others if e not in apart]
    if apart:  # A branch that updates on every micro-batch is no part of the window.
        window.inner = [b for b in inner if not all(b.excludes(end) for end in ends)]
    return all(
        any(window.every_key in text(guard.expr) for guard in e.guards(window.loop)) for e in others
    )


def _has_backward_of_last_only(window: LoopWindow) -> bool:
    """True if every micro-batch has a loss, but only the last of a window a backward."""
    window.shape = "last_only"
    made = {id(chain.base_call) for _, chain in window.chains}
    losses = [e for e in window.events if id(e.node) in made]
    divided = any(window.counts(d) for _, chain in window.chains for d in chain.divisors)
    is_meant = divided or is_accumulation_name(window.every_name)
    return is_meant and any(window.when(e) == "always" for e in losses)


def _ends(window: LoopWindow, steps: list[Event]) -> dict[Event, Boundary]:
    """Return the outermost boundary of each step that waits for one."""
    ends: dict[Event, Boundary] = {}
    for event in steps:
        for found in window.boundaries(event):
            if not found.inverse and found.kind != "deepspeed":
                ends.setdefault(event, found)
    return ends


def _nested(window: LoopWindow) -> bool:
    iterable = None if window.loop.virtual else iterated(window.loop)
    if iterable is None or not steps_after(window):
        return False
    window.shape = "nested"
    if is_call(iterable, "range", "trange"):
        return _repeats_micro_batches(window, iterable.args)
    held = [c for e in window.of("backward") for c in e.contexts(window.loop)]
    if _MICRO_NAME.search(text(iterable)) or any(map(holds_sync, held)):
        return True
    # A loss that is divided by their number, and stepped with after the loop.
    counts = [d for _, chain in window.chains for d in chain.divisors if window.counts(d)]
    if counts:
        window.end_every(counts[0].expr, "nested", None)
    return bool(counts)


def _repeats_micro_batches(window: LoopWindow, args: list[ast.expr]) -> bool:
    """Set the number of micro-batches of `for _ in range(accum)`; False if it is another loop."""
    times = _times(args)
    if times is None:
        # `for i in range(0, len(batch), micro_batch_size)`: slices of one batch.
        step = text(args[2]) if len(args) == 3 else ""
        named = bool(_MICRO_NAME.search(step)) or "batch" in step
        return len(args) == 3 and named
    count = strip_casts(window.resolver.resolve(times, window.loop.entry))
    window.end_every(count, "nested", None)
    size = number(count)
    if size is not None and size <= 1:
        return False
    names = f"{text(times)} {text(window.loop.target or times)}"
    if is_accumulation_name(f"{text(count)} {names}") or _MICRO_NAME.search(names):
        return True
    if any(d.key == window.every_name for _, chain in window.chains for d in chain.divisors):
        return True  # The loss is divided by the number of rounds.
    fetched = bool(window.loop.parents) and any(is_call(e.node, *_FETCH) for e in window.events)
    return fetched


def steps_after(window: LoopWindow) -> list[Event]:
    """Return the optimizer steps after an inner loop."""
    return [e for e in window.after if e.kind == "step" and e.loops == window.loop.parents]


def _times(args: list[ast.expr]) -> ast.expr | None:
    """Return the number of iterations of `range(n)`, `range(0, n)` and `range(1, n + 1)`."""
    if len(args) == 1:
        return args[0]
    if len(args) != 2 or number(args[0]) not in {0, 1}:
        return None
    stop = args[1]
    if number(args[0]) == 0:
        return stop
    return stop.left if is_binary(stop, ast.Add) and number(stop.right) == 1 else None
