"""The windows of a file: which loops accumulate, and how their windows end."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Container
from dataclasses import dataclass

from .call_kinds import holds_sync
from .events import Context, Event, Loop, PathItem
from .expressions import is_accumulation_name, is_binary, is_call, keyword, number, text
from .file_facts import Facts, gather
from .function_walk import Walker
from .loop_windows import LoopWindow, steps_after
from .name_resolution import strip_casts
from .surroundings import Surroundings
from .walk_file import walk_file
from .window_boundary import Boundary, iterated

_MICRO_NAME = re.compile(r"micro|chunk|split|mini_?batch|sub_?batch|accum", re.I)
# A loop is read with the events around it; the limit keeps long files linear.
_NEAR = 400
_FETCH = {"next", "get_batch", "next_batch", "sample_batch", "get_next_batch"}


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
    count = keyword(call, "gradient_accumulation_steps") if call is not None else None
    if count is not None:
        window.every = strip_casts(count)
    return True


def _in_accumulate(path: tuple[PathItem, ...]) -> bool:
    return any(isinstance(item, Context) and "accumulate" in item.names for item in path)


def _deepspeed(window: LoopWindow, inner: list[Event]) -> bool:
    engine_steps = window.of("engine_step")
    engines = {e.receiver_text for e in inner if e.detail in {"deepspeed", "engine"}}
    if not engines or not any(e.receiver_text in engines for e in engine_steps):
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
    loss_calls = {id(chain.base_call) for _, chain in window.chains}
    losses = [e for e in window.events if id(e.node) in loss_calls]
    divided = any(window.counts(d) for _, chain in window.chains for d in chain.divisors)
    is_meant = divided or is_accumulation_name(window.every_name)
    return is_meant and any(window.when(e) == "always" for e in losses)


def _ends(window: LoopWindow, steps: list[Event]) -> dict[Event, Boundary]:
    """Return the outermost boundary of each step that waits for one."""
    ends: dict[Event, Boundary] = {}
    for event in steps:
        for boundary in window.boundaries(event):
            if not boundary.inverse:
                ends.setdefault(event, boundary)
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
