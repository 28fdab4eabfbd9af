"""The windows of a file: which loops accumulate, and how their windows end."""

from __future__ import annotations

import ast
import re
from collections.abc import Container
from dataclasses import dataclass

from ..normalise import Event, Loop, NormalFile, normalise
from ..normalise.syntax import (
    is_accumulation_name,
    is_binary,
    is_call,
    keyword,
    number,
    shown,
    strip_casts,
    text,
    written,
)
from .boundary import Boundary
from .values import integer, iterated
from .window import Window, is_held, names_behind

_MICRO_NAME = re.compile(r"micro|chunk|split|islice|mini_?batch|sub_?batch|accum", re.I)


@dataclass(eq=False)
class File:
    """A file as the rules see it."""

    normal: NormalFile
    windows: list[Window]
    unread: list[Window]  # Loops with a backward whose windows are not understood.

    @property
    def accumulating(self) -> list[Window]:
        """Return the windows that accumulate the gradients of several micro-batches."""
        return [w for w in self.windows if w.accumulates]

    def shaped(self, *shapes: str) -> list[Window]:
        """Return the windows of these shapes."""
        return [w for w in self.windows if w.shape in shapes]


def read(source: str) -> File:
    """Parse one file and find its windows; raise SyntaxError as Python does."""
    file = normalise(source)
    return File(file, *_find(file))


def _find(file: NormalFile) -> tuple[list[Window], list[Window]]:
    """Return the training loops of a file that are understood, and the others."""
    inside: dict[Loop, list[Event]] = {}
    for event in file.events:
        for loop in event.loops:
            inside.setdefault(loop, []).append(event)
    understood: list[Window] = []
    unread: dict[Loop, Window] = {}
    read: set[Loop] = set()
    # Inner loops first: a loop inside that is not read as a window is a part of one micro-batch.
    for loop in sorted(inside, key=lambda loop: -len(loop.parents)):
        events = inside[loop]
        # The innermost loop around a backward iterates over micro-batches.
        inner = [e for e in events if e.kind == "backward" and _within(e, loop, unread)]
        if not inner:
            continue
        before, after = _near(events, loop, file)
        window = Window(file, loop, "plain", events, before, after, inner)
        decided = _decided(window, read)
        if decided is None:
            unread[loop] = window
        else:
            understood.append(decided)
            read.add(loop)
    # A step function whose loop is in this file was read there, with what its caller does.
    read_in_loops = {id(written(e.node)) for w in understood if not w.loop.virtual for e in w.inner}
    kept = [
        w
        for w in understood
        if not w.loop.virtual or id(written(w.inner[0].node)) not in read_in_loops
    ]
    return sorted(kept, key=lambda window: window.events[0].order), list(unread.values())


def _near(events: list[Event], loop: Loop, file: NormalFile) -> tuple[list[Event], list[Event]]:
    """Return the events before and after a loop, up to the loops with backwards beside it."""
    same = file.by_root[events[0].root]
    # A function is read at one go, so its events follow each other.
    first = events[0].order - same[0].order
    last = events[-1].order - same[0].order + 1
    parents = loop.parents
    before: list[Event] = []
    for event in reversed(same[max(0, first - 50) : first]):
        if event.kind == "backward":
            break
        if event.loops == parents:
            before.append(event)
    after: list[Event] = []
    for at in range(last, len(same)):
        event = same[at]
        if event.kind == "backward" and event.loops != parents[: len(event.loops)]:
            break
        if event.loops[: len(parents)] == parents[: len(event.loops)]:
            after.append(event)
    return before[::-1], after


def _within(event: Event, loop: Loop, unread: Container[Loop]) -> bool:
    """True if only loops that are no windows lie between a loop and an event."""
    return all(between in unread for between in event.loops[event.loops.index(loop) + 1 :])


def _decided(window: Window, read: set[Loop]) -> Window | None:
    """Return a window whose shape is known, or None if the loop is not understood."""
    if any(e.in_accumulate for e in window.inner):
        return _accelerate(window)
    # A window inside has steps of its own.
    steps = [e for e in window.of("step") if read.isdisjoint(e.loops)]
    if any(e.detail == "closure" for e in steps):
        return None
    return _with_boundary(window, steps) if steps else _nested(window)


def _accelerate(window: Window) -> Window | None:
    if not any(e.in_accumulate_of(window.loop) for e in window.inner):
        return None  # A loop inside one micro-batch of Accelerate's.
    if window.accelerator_divides is False:
        # `accumulate()` of an Accelerator without a number of steps does nothing.
        always = all(window.when(e) == "always" for e in window.of("step"))
        return window if always else None
    count = keyword(window.accelerator, "gradient_accumulation_steps")
    return window.shaped("accelerate", every=None if count is None else strip_casts(count))


def _with_boundary(window: Window, steps: list[Event]) -> Window | None:
    ends = _ends(window, steps)
    if not ends:
        return window if all(window.when(e) == "always" for e in steps) else None
    first = next(iter(ends.values()))
    if any(b.key != first.key for b in ends.values()):
        return None
    window = window.shaped("boundary", every=first.every, boundary=first)
    when = {window.when(e) for e in window.inner}
    if when == {"boundary"}:
        return _last_only(window)
    # A backward under the same condition as the step is an alternating update, not a window.
    if "inside" not in when and ("boundary" in when or when.isdisjoint({"always", "sometimes"})):
        return None
    if any(window.when(e) == "inside" for e in steps):
        return None  # Two optimizers in turn.
    # Another step on every micro-batch: several optimizers, or a loop we do not understand.
    # But `if accum == 1: step() elif boundary: step()` is one optimizer with two spellings.
    others = [e for e in steps if e not in ends and window.when(e) == "always"]
    apart = [e for e in others if all(e.excludes(end) for end in ends)]
    for other in others:
        spelled = [text(c.test) for c in other.conditions(window.loop)]
        if other not in apart and not any(window.every_key in test for test in spelled):
            return None
    if apart:  # A branch that updates on every micro-batch is no part of the window.
        window.inner = [b for b in window.inner if not all(b.excludes(end) for end in ends)]
    return window


def _last_only(window: Window) -> Window | None:
    """Return the window if every micro-batch has a loss, but only the last of it a backward."""
    assert window.boundary is not None
    bases = [term.call for _, term in window.terms]
    losses = {id(written(call)) for call in bases if call is not None}
    computed = [e for e in window.events if id(written(e.node)) in losses]
    divided = any(window.counts(d) for _, term in window.terms for d in term.divisors)
    is_meant = divided or is_accumulation_name(window.boundary.written)
    if not is_meant or not any(window.when(e) == "always" for e in computed):
        return None
    return window.shaped("last_only", every=window.every, boundary=window.boundary)


def _ends(window: Window, steps: list[Event]) -> dict[Event, Boundary]:
    """Return the outermost boundary of each step that waits for one."""
    ends: dict[Event, Boundary] = {}
    for event in steps:
        for boundary in filter(None, map(window.boundary_of, event.conditions(window.loop))):
            if not boundary.inverse:
                ends.setdefault(event, boundary)
    return ends


def _nested(window: Window) -> Window | None:
    iterable = None if window.loop.virtual else iterated(window.loop, window.file)
    if iterable is None or not window.steps_after():
        return None
    window = window.shaped("nested")
    if is_call(iterable, "range", "trange"):
        return _repeated(window, iterable)
    names = " ".join([*names_behind(window.loop.iterable, window.file), shown(window.loop.target)])
    is_written = _MICRO_NAME.search(names)
    if is_written or any(is_held(e, window.loop, window.file) for e in window.inner):
        return window
    # A loss that is divided by their number, and stepped with after the loop.
    counts = [d for _, term in window.terms for d in term.divisors if window.counts(d)]
    return window.shaped("nested", every=counts[0].expr) if counts else None


def _repeated(window: Window, iterable: ast.Call) -> Window | None:
    """Return the window of `for _ in range(accum)`, or None if it is another loop."""
    times = _times(iterable.args)
    if times is None:
        # `for i in range(0, len(batch), micro_batch_size)`: slices of one batch.
        stride = iterable.args[2] if len(iterable.args) == 3 else None
        named = f"{text(stride)} {shown(stride and written(stride))}"
        return window if _MICRO_NAME.search(named) or "batch" in named else None
    count = strip_casts(times)
    size = integer(count, window.file)
    if size is not None and size <= 1:
        return None
    window = window.shaped("nested", every=count)
    source = written(window.loop.iterable) if window.loop.iterable is not None else times
    names = f"{text(times)} {shown(source)} {shown(window.loop.target)}"
    if is_accumulation_name(names) or _MICRO_NAME.search(names):
        return window
    # The loss is divided by the number of rounds.
    divided = any(window.every_key == d.key for _, t in window.terms for d in t.divisors)
    return window if divided else None


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
