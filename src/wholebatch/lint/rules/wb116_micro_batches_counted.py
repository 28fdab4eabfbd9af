"""A schedule or a counter counts micro-batches where updates are meant."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Env
from ..model.expressions import (
    children,
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    keyword,
    last_part,
    number,
    positional,
    text,
    walk,
)
from ..model.file_facts import flat_env
from ..model.function_walk import arguments
from ..model.window_boundary import peel
from .rule_base import Report, framework_accumulates, prepared, rule, stepped

_UPDATES = re.compile(
    r"(^|[._])(global_?steps?|num_updates|n_updates|updates|update_steps?|optim(izer)?_steps?"
    r"|opt_steps?|total_updates|completed_steps)$",
    re.I,
)
_LIMIT = re.compile(r"(max|total|num|train|n)\w*_(steps|updates|iter(ation)?s)|t_total", re.I)
# Limits whose name says that they count updates. Others count whatever the user counts.
_LIMIT_OF_UPDATES = re.compile(r"update|optim|max_train_steps|t_total", re.I)
_LENGTH_OPTIONS = (
    "num_training_steps", "t_total", "total_steps", "T_max", "total_iters", "num_steps",
    "steps_per_epoch",
)  # fmt: skip
_TOTAL = re.compile(r"(total|max|num)_?(train\w*_)?(steps|iters|iterations)", re.I)
_LENGTHS = re.compile(rf"^{_TOTAL.pattern}$|_(steps|iters|iterations)$", re.I)
_POSITIONS = {"CosineAnnealingLR": 1, "OneCycleLR": 2}
_LENGTH = re.compile(
    r"\blen\([\w.\[\]'\"]*(loader|dataloader|dl|ld|batches|iterator|dataset)\w*(\(\))?\)", re.I
)


_PER_BATCH = re.compile(r"// *\(?[\w.]*batch", re.I)

# A batch size that was divided by the number of micro-batches: it is that of one of them.
_MICRO_BATCH_SIZE = re.compile(r"batch_size\s*=\s*(int\()?[\w.]*batch_size\s*//?\s*[\w.]*accum")


@rule("micro-batches counted as updates")
def check(file: File) -> Iterator[Report]:
    """Yield the schedules and counters of each window that count micro-batches."""
    for window in file.accumulating:
        yield from _schedules(window)
        yield from _counters(window)
    for call, env, framework in _stepped_elsewhere(file):
        length = _length(call)
        spelled = [] if length is None else _spellings(length, env)
        if any(map(_LENGTH.search, spelled)) and not any(map(is_accumulation_name, spelled)):
            yield Report(
                call,
                f"schedule is as long as the micro-batches, but {framework} steps it once per "
                "update: divide its length by the number of micro-batches per update",
            )


def _stepped_elsewhere(file: File) -> Iterator[tuple[ast.Call, Env, str]]:
    """Yield what may be a schedule that Lightning, or Accelerate in another module, steps."""
    facts = file.facts
    for owner in facts.classes if framework_accumulates(file) else ():
        method = owner.methods.get("configure_optimizers")
        if method is not None and "automatic_optimization = False" not in text(owner.node):
            nodes = [*walk(method)]
            env = flat_env(nodes)
            yield from ((n, env, "Lightning") for n in nodes if isinstance(n, ast.Call))
    if not file.windows and facts.accelerator_divides:
        handed = " ".join(map(text, facts.made("prepare", "prepare_scheduler")))
        named = [v for n in re.findall(r"[\w.]+", handed) for v in facts.assigned.get(n, ())]
        for call in (v for v in named if isinstance(v, ast.Call)):
            yield call, facts.env_around(call), "Accelerate"


def _schedules(window: LoopWindow) -> Iterator[Report]:
    """Yield schedules, and optimizers that schedule themselves, that are as long as the loop."""
    if window.shape not in {"boundary", "accelerate"}:
        return
    events = [e for e in window.of("sched") if window.when(e) == "boundary"]
    if window.shape == "boundary":
        events += stepped(window)
    else:  # Accelerate steps what it has prepared with the optimizer, once per update.
        events += [e for e in window.of("sched") if e not in events and prepared(e, window.facts)]
    for call, env in [made for event in events for made in _made(event, window)]:
        if any(_counts_micro_batches(length, env, window) for length in _lengths(call, window)):
            yield Report(
                call,
                f"schedule is as long as the micro-batches but steps once every "
                f"`{window.count_name}`: divide its length by it",
            )


def _made(event: Event, window: LoopWindow) -> list[tuple[ast.Call, Env]]:
    """Return the calls that made a schedule or optimizer, also under a longer name elsewhere."""
    name = "" if event.receiver is None else text(event.receiver)
    known: list[tuple[ast.expr, Env]] = [*window.makers(name, event.env)]
    own = name.rpartition(".")[2]
    if not known and own:
        endings, assigned = window.facts.endings, window.facts.assigned
        lists = [n for n in endings.get(f"{own}s", ()) if n.endswith(f".{own}s")]
        names = [*endings.get(own, ()), *lists]
        known = [(value, Env()) for other in names for value in assigned[other]]
    calls = [call for made, env in known for call in _calls(made, env)]
    # A function of the file that makes and returns one of several schedules.
    makers = {f.name: f for f in window.facts.every_function} if calls else {}
    for made_by, where in {last_part(c.func): (c, env) for c, env in calls}.values():
        function = makers.get(last_part(made_by.func))
        nodes = [] if function is None else [*walk(function)]
        inside = [n for n in nodes if isinstance(n, ast.Call) and last_part(n.func).endswith("LR")]
        env = flat_env(nodes)
        handed = {} if function is None else arguments(made_by, function, where, ())
        for name in handed.keys() - env.keys():
            env.bind(name, handed[name])
        calls += [(call, env) for call in inside]
    return calls


def _calls(
    made: ast.AST, env: Env, within: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[ast.Call, Env]]:
    """Yield the schedules of a list, those of which another is made, or the one schedule.

    A schedule may be made of what had its name before (`within`): it is read once.
    """
    several = isinstance(made, (ast.List, ast.ListComp, ast.keyword))
    if several or is_call(made, "SequentialLR", "ChainedScheduler"):
        for part in children(made):
            yield from _calls(part, env, (*within, made))
    elif isinstance(made, ast.Call):
        yield made, env
    else:
        for definition in env.get(dotted(made) or "", ()):
            found = definition.expr
            if isinstance(found, (ast.Call, ast.List)) and found not in within:
                yield from _calls(found, definition.env, within)


def _lengths(call: ast.Call, window: LoopWindow) -> list[ast.expr]:
    """Return the length of a schedule, or what can be: what its function reads, or the limit."""
    known = _length(call)
    if call.args and str(getattr(call.args[0], "value", "")).startswith("constant"):
        return []  # `get_scheduler("constant", ...)`: its length means nothing.
    if known is not None:
        return [known]
    if last_part(call.func) != "LambdaLR":
        limits = _limits(window)
        read = [*window.facts.imported_parts(call, levels=0)]  # A factory of another module.
        whole = bool(read) and not is_accumulation_name(read[0] + text(call))
        made_by = (f for f in window.facts.every_function if f.name == last_part(call.func))
        if any(is_accumulation_name(text(f)) for f in made_by):
            return []  # It may divide the length itself.
        return [
            a
            for a in call.args
            if text(a) in limits
            or _TOTAL.fullmatch(last_part(a))
            or (whole and _LENGTH.fullmatch(text(a)))
        ]
    made = positional(call, 1) or keyword(call, "lr_lambda")
    named = [f for f in window.facts.every_function if made is not None and f.name == text(made)]
    known = _length(made) if isinstance(made, ast.Call) else None
    if known is not None:
        return [known]
    nodes = [n for f in (*named, made) if f is not None for n in walk(f)]
    return [n for n in nodes if isinstance(n, ast.Name) and _LENGTHS.search(n.id)]


def _length(call: ast.Call) -> ast.expr | None:
    for name in _LENGTH_OPTIONS:
        given = keyword(call, name)
        if given is not None:
            return given
    name = last_part(call.func)
    if re.match(r"get_(?!\w*optim)\w*schedule|\w*Warmup\w*(Scheduler|Schedule|LR)$", name):
        return positional(call, 2)  # The usual signature: (optimizer, warm-up, length).
    if not name and "sched" in text(call.func):
        return call.args[-1] if len(call.args) > 2 else None  # `schedulers[kind](optimizer, ...)`
    at = _POSITIONS.get(name)
    return None if at is None else positional(call, at)


def _counts_micro_batches(expr: ast.expr, env: Env, window: LoopWindow) -> bool:
    """True if the length counts batches of a loader and is nowhere divided by the window."""
    if _times_count(expr, env, window):
        return True
    spelled = _spellings(expr, env)
    # A batch size that is divided by the window makes more micro-batches, not fewer.
    small = window.facts.mentions(_MICRO_BATCH_SIZE)
    others = [s for s in spelled if not small or "batch_size" not in s or "len(" in s]
    if any(is_accumulation_name(s) or _has_count(s, window) for s in others):
        return False
    limits = _limits(window)
    if limits & {text(expr), window.resolver.key(expr, env)}:
        return True
    words = [rf"(?<![\w.]){re.escape(limit)}(?![\w.(\[]| */)" for limit in limits]
    if any(re.search(word, s) for word in words for s in spelled):
        return True  # `steps_per_epoch * epochs`, in a loop over `range(steps_per_epoch)`.
    if small and any(re.search(r"len\(.*\) */+ *[\w.]*batch_size", s) for s in spelled):
        return True
    # A loader that is cut to whole windows already counts updates.
    if any(_LENGTH.search(s) and "//" not in s for s in spelled):
        return True
    # Samples over the batch size of the loader, which is that of a micro-batch.
    sizes = [keyword(c, "batch_size") for c in window.facts.made("DataLoader")]
    by = "|".join(re.escape(last_part(size)) for size in sizes if size is not None and dotted(size))
    return bool(by) and any(re.search(rf"len\(.*\) *//? *[\w.]*\b({by})\b", s) for s in spelled)


def _times_count(expr: ast.expr, env: Env, window: LoopWindow, depth: int = 0) -> bool:
    """True for `max_train_steps * accum`, also through names."""
    if is_binary(expr, ast.Mult):
        sides = [expr.left, expr.right]
        named = [text(s) for s in sides if dotted(s) is not None]
        counts = any(is_accumulation_name(n) or n == window.every_name for n in named)
        return counts or any(_times_count(s, env, window, depth) for s in sides)
    made = env.get(dotted(expr) or "", ()) if depth < 3 else ()
    return any(_times_count(d.expr, d.env, window, depth + 1) for d in made)


def _limits(window: LoopWindow) -> set[str]:
    """Return the loop's number of iterations, as text: `range(n)`, or a clock compared with `n`."""
    iterable = peel(window.loop.iterable, window.loop.entry)
    if is_call(iterable, "range", "trange"):
        last = [a.left if is_binary(a, ast.Add) else a for a in iterable.args[-1:]]
        return {text(a) for a in last if number(a) is None}
    found: set[str] = set()
    for node in walk(window.loop.node):
        leaves = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Break)
        test = node.test if leaves or isinstance(node, ast.While) else None  # type: ignore[attr-defined]
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            sides = [test.left, test.comparators[0]]
            plain = [s.left if is_binary(s, ast.Add) and number(s.right) == 1 else s for s in sides]
            for clock, limit in (plain, plain[::-1]):
                if _is_the_clock(text(clock), window) and number(limit) is None:
                    found |= {text(limit), window.resolver.key(limit, window.loop.entry)}
    return found


def _has_count(spelled: str, window: LoopWindow) -> bool:
    name = window.every_name
    if not window.every_key:
        return False
    if window.every is not None and number(window.every) is not None:
        # With a literal count, only a division by it is evidence, not any 4 in the text.
        return bool(re.search(rf"/ *{re.escape(name)}(?![\w.])", spelled))
    return bool(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", spelled))


def _spellings(expr: ast.expr, env: Env, depth: int = 0) -> list[str]:
    found = [text(expr)]
    if depth > 4:
        return found
    # How a loader was built says nothing about what its length is divided by.
    held = {text(a) for node in walk(expr) if is_call(node, "len") for a in node.args}
    # Nor does how the owner of a setting was built: `accelerator.num_processes`.
    held |= {text(node.value) for node in walk(expr) if isinstance(node, ast.Attribute)}
    for node in walk(expr):
        if isinstance(node, (ast.Name, ast.Attribute)) and text(node) not in held:
            for definition in env.get(text(node), ()):
                if text(definition.expr) != text(node):
                    found += _spellings(definition.expr, definition.env, depth + 1)
    return found


def _counters(window: LoopWindow) -> Iterator[Report]:
    for event in window.of("augment"):
        if not isinstance(event.stmt, ast.AugAssign) or window.when(event) != "always":
            continue
        name = text(event.stmt.target)
        if not _UPDATES.search(name) or text(event.stmt.value) != "1":
            continue
        if _is_the_clock(name, window) or not _is_compared(name, window):
            continue
        if all(event.excludes(step) for step in window.of("step", "engine_step")):
            continue  # On a branch of its own, without the optimizer.
        yield Report(
            event.node,
            f"`{name}` goes up on every micro-batch but is compared with a number of updates: "
            f"it runs `{window.count_name}` times too fast; count it where the optimizer steps",
        )


def _is_the_clock(name: str, window: LoopWindow) -> bool:
    """True if the boundary uses this counter, so that it counts micro-batches on purpose."""
    return window.boundary is not None and bool(
        re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", text(window.boundary.expr))
    )


def _is_compared(name: str, window: LoopWindow) -> bool:
    outer = window.loop.parents[0].node if window.loop.parents else window.loop.node
    for node in walk(outer):
        if not isinstance(node, ast.Compare) or len(node.comparators) != 1:
            continue
        sides = {text(side): side for side in (node.left, node.comparators[0])}
        limits = [side for s, side in sides.items() if s != name and _LIMIT.search(s)]
        if name in sides and any(_is_of_updates(limit, window) for limit in limits):
            return True
    return False


def _is_of_updates(limit: ast.expr, window: LoopWindow) -> bool:
    """True if the file computes a limit as a number of updates, or its name says so."""
    spelled = _spellings(limit, window.loop.entry)
    if any(is_accumulation_name(s) or _has_count(s, window) for s in spelled):
        return True
    counted = any(_LENGTH.search(s) or _PER_BATCH.search(s) for s in spelled)
    return not counted and any(map(_LIMIT_OF_UPDATES.search, spelled))
