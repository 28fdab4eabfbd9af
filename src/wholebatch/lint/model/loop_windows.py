"""The windows of a file: the loop that accumulates, its micro-batch count, and its boundary."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from .events import MODEL_NAME, Env, Event, Guard, Loop, holds_sync
from .expressions import (
    assigned_names,
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    keyword,
    number,
    text,
    walk,
)
from .file_facts import Facts, gather
from .function_walk import Walker, walk_file
from .loss_origin import Chain, Divisor, trace
from .name_resolution import Resolver, strip_casts
from .window_boundary import Boundary, iterated, of_guard, says_accumulating

_MICRO_NAME = re.compile(r"micro|chunk|split|mini_?batch|sub_?batch|accum", re.I)
# A loop is read with the events around it; the limit keeps long files linear.
_NEAR = 400
_DEEPSPEED_ACCUMULATES = re.compile(r"gradient_accumulat|\bgas\b", re.I)
_ACCUMULATES = re.compile(r"\baccumulate\(")
# TensorFlow's gradients do not add up by themselves.
_TAPES_ADD = re.compile(
    r"assign_add\(\s*\w*g|\+=?\s*\w*grad|grad\w*\s*\+|\[(\w+) \+ (\w+)\b[^]\n]* for \1, \2|add_n\("
)
_PARTS_OF_BATCH = re.compile(r"//? *[\w.]*batch|ceil\([^()]*/ *[\w.]*batch", re.I)
_MOVES = ("to", "cuda", "float", "long", "contiguous", "view", "reshape", "flatten")
# What belongs to one of several optimizers; the rest of a loop belongs to all of them.
_OWNED = {"backward", "step", "zero", "clip", "unscale", "sched"}
# A class of Lightning or transformers that computes its own loss.
_STEPS = re.compile(r"^class \w+\([^)]*(Module|Trainer)(.|\n)*def (training_step|compute_loss)\(")
_FETCH = {"next", "get_batch", "next_batch", "sample_batch", "get_next_batch"}


@dataclass(eq=False)
class LoopWindow:
    """One training loop. `shape` says how its windows end.

    The shapes are boundary (a condition on a counter), nested (an inner loop over the
    micro-batches), accelerate, deepspeed, and plain (an update for every batch: nothing is
    accumulated).
    """

    loop: Loop
    shape: str
    events: list[Event]
    before: list[Event]
    after: list[Event]
    resolver: Resolver
    facts: Facts
    inner: list[Event] = field(
        default_factory=list
    )  # Its own backwards, not those of a window inside.
    boundary: Boundary | None = None
    every: ast.expr | None = None
    ends: list[Event] = field(default_factory=list)  # The steps at the boundary.
    alone: bool = True  # False if other optimizers of the loop have other windows.
    _when: dict[Event, str] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """True if the gradients of several micro-batches are meant to add up here."""
        return self.shape != "plain"

    @cached_property
    def every_key(self) -> str:
        """Return the number of micro-batches as comparable text, or "" if unknown."""
        return "" if self.every is None else text(self.every)

    @property
    def every_name(self) -> str:
        """Return the number of micro-batches as written in the source."""
        return re.sub(r"@\d+", "", self.every_key) or "K"

    @cached_property
    def count_name(self) -> str:
        """Return the number of micro-batches by the name that the user gave it, for messages."""
        written = [self.boundary.expr] if self.boundary is not None else []
        written += [] if self.loop.iterable is None else [self.loop.iterable]
        names = [name for expr in written for name in self._counts_in(expr)]
        divisors = [d for _, chain in self.chains for d in chain.divisors if self.counts(d)]
        if self.every_name.isdigit():
            names += [d.written for d in divisors if not d.written.isdigit()]
        return names[0] if names else self.every_name

    def _counts_in(self, expr: ast.expr) -> Iterator[str]:
        """Yield the names in a condition or an iterable that stand for the number."""
        for node in walk(expr):
            if is_binary(node, ast.Mod) and dotted(node.right):
                yield text(node.right)
            elif is_call(node, "range") and node.args and dotted(node.args[-1]):
                last = strip_casts(self.resolver.resolve(node.args[-1], self.loop.entry))
                if text(last) == self.every_key:
                    yield text(node.args[-1])

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
            found = of_guard(guard, self.loop, self.resolver)
            if found is not None:
                yield found

    def _classify(self, event: Event) -> str:
        if self.loop not in event.path:
            return "outside"
        if self.ends and all(self._other_mode(event, end) for end in self.ends):
            return "never"
        sometimes = False
        ours: set[str] = set()
        # If nothing asks Accelerate to accumulate, `sync_gradients` is always true.
        always_syncs = self.shape == "boundary" and "accumulate" not in self.facts.called
        for guard in event.guards(self.loop):
            found = of_guard(guard, self.loop, self.resolver)
            if found is None and self._without_accumulation(guard):
                return "never"
            if found is not None and found.kind == "accelerate" and always_syncs:
                continue
            if found is not None and self.is_ours(found):
                ours.add("inside" if found.inverse else "boundary")
            elif (guard.origin == "if" and self._varies(guard)) or guard.origin == "except":
                sometimes = True
        if ours:
            return ours.pop() if len(ours) == 1 else "never"
        return "sometimes" if sometimes and not self._beside_backward(event) else "always"

    def _beside_backward(self, event: Event) -> bool:
        """True if an event has only the conditions of a backward: whenever there is a gradient."""
        mine = event.conditions(self.loop)
        return event.kind == "clip" and any(mine <= b.conditions(self.loop) for b in self.inner)

    def _other_mode(self, event: Event, end: Event) -> bool:
        """True if a setting (not the boundary) puts an event on another branch than a step."""
        mine = {g.key for g in event.guards(self.loop) if g.origin == "if"}
        return any(
            (g.key[0], not g.positive) in mine
            and not self._varies(g)
            and of_guard(g, self.loop, self.resolver) is None
            for g in end.guards(self.loop)
        )

    def is_ours(self, found: Boundary) -> bool:
        """True if a condition ends these windows and is not, say, a logging interval."""
        if self.shape == "accelerate" or self.boundary is None:
            return found.kind in {"accelerate", "deepspeed"} or is_accumulation_name(found.key)
        if found.kind == "accelerate" or self.boundary.kind == found.kind == "last":
            return True
        return found.key == self.every_key

    def _without_accumulation(self, guard: Guard) -> bool:
        """True if this is the branch without accumulation (`if k == 1`)."""
        accumulating = says_accumulating(
            self.resolver.resolve(guard.expr, guard.env), self.every_key
        )
        return accumulating is not None and accumulating != guard.positive

    def _varies(self, guard: Guard) -> bool:
        resolved = self.resolver.resolve(guard.expr, guard.env)
        return self.resolver.varies(resolved, self.loop)

    def counts(self, divisor: Divisor) -> bool:
        """True if a divisor of the loss is the number of micro-batches of a window."""
        over = iterated(self.loop) if self.shape == "nested" else None
        if over is not None and divisor.key == f"len({text(over)})":
            return True  # `for part in parts: (loss / len(parts)).backward()`
        return is_accumulation_name(divisor.written) or self.is_count(divisor.key)

    def is_own(self, divisor: Divisor) -> bool:
        """True if a divisor is a size of the micro-batch itself, and no count of micro-batches."""
        target, over = self.loop.target, text(self.loop.iterable or ast.Pass())
        index = target.elts[0] if isinstance(target, ast.Tuple) else target
        is_index = re.search(r"enumerate\(|range\(", over)
        counters = self.loop.carried | ({text(index)} if is_index and index else set())
        mine = [s for s in self.resolver.symbols_in(divisor.expr) if s.loop is self.loop]
        varies = self.resolver.varies(divisor.expr, self.loop)
        return varies and not any(s.name in counters for s in mine)

    def is_count(self, key: str) -> bool:
        """True if a text means the number of micro-batches of a window."""
        return (bool(key) and key == self.every_name) or is_accumulation_name(key)

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
        spelled = text(inner)
        if re.search(r"cycle|infinite|repeat|islice|count\(|forever|yield_|inf_", spelled, re.I):
            return False
        if re.search(r"\bt?range\(", spelled):
            per_epoch = r"len\(|num_batches|batches_per_epoch|(steps|iters|it)_per_epoch"
            return bool(re.search(per_epoch, spelled))
        for definition in self.loop.entry.get(dotted(inner) or "", ()):
            made = text(definition.expr)[:400]
            if re.search(r"cycle\w*\(|infinite|\brepeat\(|islice\(", made):
                return False
            if re.search(r"\brange\(", made) and "len(" not in made:
                return False
        return not self._left_by_count()

    def _left_by_count(self) -> bool:
        """True if a top-level loop is left after a number of updates: its iterable has no end."""
        if self.loop.parents or not isinstance(self.loop.node, (ast.For, ast.AsyncFor)):
            return False
        around = self.facts.functions_around(self.loop.node.lineno)
        if any("epoch" in f"{f.name} {text(f.args)}" for f in around):
            return False  # Called once per epoch.
        tests = [node for node in walk(self.loop.node) if isinstance(node, ast.If)]
        limits = [
            test
            for test in tests
            if isinstance(test.test, ast.Compare)
            and isinstance(test.test.ops[0], (ast.GtE, ast.Gt, ast.Eq))
            and re.search(r"step|iter|update", text(test.test.left))
        ]
        # `if step >= limit: stop = True`, and `if stop: break`
        said = [stmt for limit in limits for stmt in limit.body if text(stmt).endswith(" = True")]
        flags = "|".join(map(re.escape, assigned_names(said)))
        limits += [t for t in tests if flags and re.search(rf"\b({flags})", text(t.test))]
        return any(isinstance(inner, ast.Break) for limit in limits for inner in limit.body)


def unmoved(made: ast.expr) -> ast.expr:
    """Return `CrossEntropyLoss(...)` for `CrossEntropyLoss(...).to(device)`."""
    while is_call(made, *_MOVES) and isinstance(made.func, ast.Attribute):
        made = made.func.value
    return made


@dataclass(eq=False)
class File:
    """A file as the rules see it."""

    tree: ast.Module
    facts: Facts
    windows: list[LoopWindow]
    trained: str = ""  # The class that a framework trains, and accumulates, in another file.

    @property
    def accumulating(self) -> list[LoopWindow]:
        """Return the windows that accumulate the gradients of several micro-batches."""
        return [w for w in self.windows if w.accumulates]

    @cached_property
    def models(self) -> list[ast.Call]:
        """Return the calls that build something called a model, except frozen ones."""
        stopped = r"([\w.]+?)(?:\.eval\(\))?\.requires_grad_\(False\)"
        lines = [n for n in self.facts.source.split("\n") if "requires_grad_(False)" in n]
        frozen = {name for line in lines for name in re.findall(stopped, line)}
        evaluated = re.findall(r"([\w.]+)\.eval\(\)", self.facts.source)
        frozen |= {*evaluated} - {*re.findall(r"([\w.]+)\.train\w*\(", self.facts.source)}
        return [
            call
            for name, values in self.facts.assigned.items()
            if MODEL_NAME.match(name.rpartition(".")[2]) and name not in frozen
            for call in map(unmoved, values)
            if isinstance(call, ast.Call)
        ]

    def shaped(self, *shapes: str) -> list[LoopWindow]:
        """Return the windows of these shapes."""
        return [w for w in self.windows if w.shape in shapes]


def read(source: str, path: str = "") -> File:
    """Parse and model one file; raise SyntaxError as Python does."""
    with warnings.catch_warnings():
        # Ignore warnings about invalid escapes in the file's strings.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    facts = gather(tree, source, path)
    return File(tree, facts, find_windows(walk_file(tree, facts), facts))


def read_trained(file: File, name: str) -> File | None:
    """Read the module of an imported class that a framework trains in a file, but for its loops."""
    found = file.facts.imported(name)
    if found is None or not _STEPS.search(found.text):
        return None
    try:
        source = Path(found.path).read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    facts = gather(tree, source, found.path)
    facts.data_parts = [*facts.data_parts, *file.facts.data_parts]
    return File(tree, facts, [], re.findall(r"\w+", found.text)[1])


def find_windows(walker: Walker, facts: Facts) -> list[LoopWindow]:
    """Return every training loop of the file that is understood."""
    inside: dict[Loop, list[Event]] = {}
    for event in walker.events:
        for loop in event.loops:
            inside.setdefault(loop, []).append(event)
    found: list[LoopWindow] = []
    unread: set[Loop] = set()
    # Inner loops first: a loop inside that is not read as a window is a part of one micro-batch.
    for loop in sorted(walker.loops, key=lambda loop: -len(loop.parents)):
        events = inside.get(loop, [])
        # The innermost loop around a backward iterates over micro-batches.
        inner = [e for e in events if e.kind == "backward" and _within(e, loop, unread)]
        if not inner:
            continue
        if _over_optimizers(loop):
            unread.add(loop)  # A part of one micro-batch.
            continue
        first, last = events[0].order, events[-1].order
        root, parents = events[0].root, loop.parents
        near = walker.events[max(0, first - _NEAR) : first]
        before = [e for e in near if e.loops == parents and e.root == root]
        near = walker.events[last + 1 : last + _NEAR]
        after = [e for e in near if e.root == root]
        if parents:  # After an outer loop too.
            after = [e for e in after if e.loops[: len(parents)] == parents[: len(e.loops)]]
        window = LoopWindow(loop, "plain", events, before, after, walker.resolver, facts, inner)
        read = [window] if _decide(window, inner) else _by_optimizer(window)
        found += read
        if not read:
            unread.add(loop)
    # A step function whose loop is in this file was read there, with what its caller does.
    read_in_loops = {id(e.node) for w in found if not w.loop.virtual for e in w.inner}
    kept = [w for w in found if not w.loop.virtual or id(w.inner[0].node) not in read_in_loops]
    return sorted(kept, key=lambda window: window.events[0].order)


def _by_optimizer(window: LoopWindow) -> list[LoopWindow]:
    """Return the windows of a loop whose optimizers have clocks of their own.

    Each backward belongs to the optimizer of the next step on its path, and so does what happens
    between the two.
    """
    steps = window.of("step")
    names = dict.fromkeys(s.receiver_text for s in steps)
    owners: dict[Event, str] = {}
    for event in window.of(*_OWNED) if len(names) > 1 else ():
        later = (s for s in steps if s.order >= event.order and not s.excludes(event))
        following = next(later, steps[0]).receiver_text
        owners[event] = event.receiver_text if event.receiver_text in names else following
    parts = []
    for name in names if owners else ():
        events = [e for e in window.events if owners.get(e, name) == name]
        inner = [e for e in window.inner if owners[e] == name]
        part = replace(
            window, shape="plain", events=events, inner=inner, ends=[], alone=False, _when={}
        )
        if inner and _decide(part, inner) and part.accumulates:
            parts.append(part)
    return parts


def _within(event: Event, loop: Loop, unread: set[Loop]) -> bool:
    """True if only loops that are no windows lie between a loop and an event."""
    return all(between in unread for between in event.loops[event.loops.index(loop) + 1 :])


def _decide(window: LoopWindow, inner: list[Event]) -> bool:
    if any(e.detail == "tape" for e in inner) and not window.facts.mentions(_TAPES_ADD):
        return False
    if _accelerate(window, inner) or _deepspeed(window, inner):
        return True
    steps = window.of("step")
    if any(e.detail == "closure" for e in steps):
        return False
    if steps:
        return _boundary(window, steps, inner)
    return _nested(window)


def _accelerate(window: LoopWindow, inner: list[Event]) -> bool:
    contexts = [context for e in inner for context in e.contexts(window.loop)]
    if not any(_ACCUMULATES.search(context.made) for context in contexts):
        return False
    if window.facts.accelerator_divides is False:
        # `accumulate()` of an Accelerator without a number of steps does nothing.
        return all(window.when(e) == "always" for e in window.of("step"))
    window.shape = "accelerate"
    call = window.facts.accelerator
    given = keyword(call, "gradient_accumulation_steps") if call is not None else None
    if given is not None:
        window.every = strip_casts(given)
    return True


def _deepspeed(window: LoopWindow, inner: list[Event]) -> bool:
    engine_steps = window.of("engine_step")
    engines = {e.receiver_text for e in inner if e.detail in {"deepspeed", "engine"}}
    if not engines or not any(e.receiver_text in engines for e in engine_steps):
        return False
    if any(e.detail in {"tensor", "accelerate"} for e in inner):
        return False
    # The engine's configuration decides whether it accumulates; the file must at least mention it.
    accumulates = window.facts.mentions(_DEEPSPEED_ACCUMULATES)
    window.shape = "deepspeed" if accumulates else "plain"
    return accumulates


def _boundary(window: LoopWindow, steps: list[Event], inner: list[Event]) -> bool:
    ends = _ends(window, steps)
    if not ends:
        return _stepped_always(window, steps)
    first = next(iter(ends.values()))
    if any(b.key != first.key for b in ends.values()):
        return False
    window.ends = list(ends)
    window.end_every(first.every, "boundary", first)
    if first.kind == "last" and first.every is None:
        return False
    when = {window.when(e) for e in inner}
    # A backward under the same condition as the step is an alternating update, not a window.
    # One more before the step of a window is a part of it: an attack on the weights, say.
    attacked = "always" in when and is_accumulation_name(window.every_name)
    if "boundary" in when and "inside" not in when and not attacked:
        return False
    if not when & {"always", "inside", "sometimes"}:
        return False
    # Another step on every micro-batch: several optimizers, or a loop we do not understand.
    # But `if accum == 1: step() elif boundary: step()` is one optimizer with two spellings.
    if any(window.when(e) == "inside" for e in steps):
        return False  # Two optimizers in turn.
    others = [e for e in steps if e not in ends and window.when(e) == "always"]
    others = [e for e in others if not all(e.excludes(end) for end in ends)]
    return all(
        any(window.every_key in text(guard.expr) for guard in e.guards(window.loop)) for e in others
    )


def _ends(window: LoopWindow, steps: list[Event]) -> dict[Event, Boundary]:
    """Return the outermost boundary of each step that waits for one."""
    ends: dict[Event, Boundary] = {}
    for event in steps:
        for found in window.boundaries(event):
            if not found.inverse and found.kind != "deepspeed":
                ends.setdefault(event, found)
    return ends


def _stepped_always(window: LoopWindow, steps: list[Event]) -> bool:
    """Classify a loop whose steps are all unconditional.

    A conditional clearing can still show that accumulation is meant.
    """
    for event in window.of("zero"):
        for found in window.boundaries(event):
            counts = found.kind in {"modulo", "reset"} and is_accumulation_name(found.key)
            if counts and not found.inverse:
                window.end_every(found.every, "boundary", found)
                return True
    return all(window.when(e) == "always" for e in steps)


def _nested(window: LoopWindow) -> bool:
    iterable = None if window.loop.virtual else iterated(window.loop)
    if iterable is None or not steps_after(window):
        return False
    window.shape = "nested"
    if is_call(iterable, "range", "trange"):
        return _repeats_micro_batches(window, iterable.args)
    held = [c for e in window.of("backward") for c in e.contexts(window.loop)]
    if _MICRO_NAME.search(text(iterable)) or any(map(holds_sync, held)) or window.of("ddp_flag"):
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
        return len(args) == 3 and (named or _over_slices(window))
    count = strip_casts(window.resolver.resolve(times, window.loop.entry))
    window.end_every(count, "nested", None)
    size = number(count)
    if size is not None and size <= 1:
        return False
    names = f"{text(times)} {text(window.loop.target or times)}"
    if is_accumulation_name(f"{text(count)} {names}") or _MICRO_NAME.search(names):
        return True
    if _PARTS_OF_BATCH.search(text(count)):
        return True
    if any(d.key == window.every_name for _, chain in window.chains for d in chain.divisors):
        return True  # The loss is divided by the number of rounds.
    fetched = bool(window.loop.parents) and any(is_call(e.node, *_FETCH) for e in window.events)
    return fetched or _over_slices(window)


def _over_slices(window: LoopWindow) -> bool:
    """True if a loop takes its micro-batches out of one batch: `x[i * n : (i + 1) * n]`."""
    if not isinstance(window.loop.target, ast.Name):
        return False
    index = rf"\b{window.loop.target.id}\b"
    nodes = [*walk(window.loop.node)]
    made = [n for n in nodes if isinstance(n, ast.Assign) and re.search(index, text(n.value))]
    starts = {text(n.targets[0]) for n in made}
    cuts = [
        n.slice for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Slice)
    ]
    lower = [text(c.lower) for c in cuts if c.lower is not None and c.upper is not None]
    return any(low in starts or re.search(index, low) for low in lower)


def steps_after(window: LoopWindow) -> list[Event]:
    """Return the optimizer steps after an inner loop, also in a loop over several optimizers."""
    parents = window.loop.parents

    def is_ours(loops: tuple[Loop, ...]) -> bool:
        return loops == parents or (loops[:-1] == parents and _over_optimizers(loops[-1]))

    return [e for e in window.after if e.kind == "step" and is_ours(e.loops)]


def _over_optimizers(loop: Loop) -> bool:
    if loop.iterable is None or is_call(iterated(loop), "range", "trange"):
        return False  # `range(opt.accum)`: settings can be called `opt` too.
    return bool(re.search(r"opt(?!ion)", text(loop.iterable), re.I))


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
