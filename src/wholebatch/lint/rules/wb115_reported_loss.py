"""The reported loss is the divided one, or only that of the last micro-batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Env
from ..model.expressions import (
    dotted,
    is_accumulation_name,
    is_binary,
    is_call,
    last_part,
    text,
    walk,
)
from ..model.loss_origin import Chain, trace
from ..model.name_resolution import strip_casts
from .rule_base import Report, rule

_SINK = re.compile(
    r"(\w+_)?print\w*|log|log(_|kv)\w*|info|debug|warning|add_scalars?|set_postfix\w*|report\w*"
    r"|set_description\w*|Logger|write|scalar_summary|(update_|write_)?progress_?bar|track|\w+_log"
)
_KEEPERS = re.compile(r"loss|meter|metric|avg|average|tracker|history|record|stat|^logs?$", re.I)
_WRITER = re.compile(
    r"(^|[._])(tb|\w*writer|\w*logger|wandb|tracker|tensorboard|mlflow|recorder|swanlab|board)$",
    re.I,
)
_MATH = re.compile(r"log_(softmax|prob|sigmoid|every|likelihood|sum)\w*|\w*softmax\w*")
_BAR = re.compile(r"p_?bar|prog(ress)?_?bar|progress", re.I)
_LAST = (
    "reported loss is that of the last micro-batch, not of the window: log the mean over its "
    "micro-batches"
)


@rule(
    "WB115",
    "reported loss",
    "The loss that is logged is the divided one, or that of the last micro-batch.",
)
def check(file: File) -> Iterator[Report]:
    """Yield at most one report of each kind per window."""
    shown: set[int] = set()
    windows = file.accumulating
    known = {id(window): _bases(window) for window in windows}
    for at, window in enumerate(windows):
        bases = set(known[id(window)])
        if not bases:
            continue
        # One of two loops (`if amp: ... else: ...`) computed the loss that is logged after both.
        for other in windows[max(0, at - 2) : at + 3]:
            if other.shape == window.shape and other.loop.parents == window.loop.parents:
                bases |= known[id(other)]
        found = [*_logged(window, bases, file), *_averaged(window, bases, file)]
        for report in found or _kept_at_boundary(window, bases):
            if id(report.node) not in shown:
                shown.add(id(report.node))
                yield report


def _bases(window: LoopWindow) -> set[int]:
    return {
        id(chain.base)
        for event in window.of("backward")
        for chain in trace(event.argument, event.env, window.resolver)
        if chain.base is not None
    }


def _loss_chains(
    expr: ast.expr | None, env: Env, window: LoopWindow, bases: set[int]
) -> list[Chain]:
    """Return the derivations of a value if all of them start at a loss of the window, else [].

    After an inner loop, the value before may be mixed in: a moving average.
    """
    chains = trace(expr, env, window.resolver)
    ours = [c for c in chains if id(c.base) in bases]
    others = [c for c in chains if id(c.base) not in bases]
    smoothed = window.shape == "nested" and all(
        c.weighted and not isinstance(c.base, ast.Call) for c in others
    )
    return ours if not others or smoothed else []


def _logged(window: LoopWindow, bases: set[int], file: File) -> Iterator[Report]:
    reported: set[str] = set()
    for event, shown in _shown(window):
        for value, env in _values(shown, event.env):
            chains = _loss_chains(value, env, window, bases)
            if any(_is_divided(c, window) for c in chains):
                words = (
                    f"reported loss was divided by `{window.count_name}`: it is that many times "
                    "too small; log the loss before the division, averaged over the window"
                )
            elif chains and all(_is_multiplied(c, window) for c in chains):
                words = (
                    f"reported loss is multiplied by `{window.count_name}`, but was not divided "
                    "by it: it is that many times too large; log the loss as it is"
                )
            elif chains and _is_last(event, window):
                words = _LAST
            else:
                continue
            if words not in reported:
                reported.add(words)
                yield Report(_where(event, value, env, window, file), words)
                break


def _shown(window: LoopWindow) -> Iterator[tuple[Event, list[ast.expr]]]:
    """Yield what is logged, and the numbers that the function returns to its caller."""
    events = list(window.events)
    if _is_inner(window):
        events += [e for e in window.after if e.loops == window.loop.parents]
    for event in events:
        # An inner loop (an evaluation, say) has losses of its own.
        if event.loops[-1:] not in {(window.loop,), window.loop.parents[-1:]}:
            continue
        call = event.node
        if event.kind == "call" and isinstance(call, ast.Call) and _is_sink(call):
            yield event, [*call.args, *(k.value for k in call.keywords)]
        elif event.kind == "return" and event.argument is not None:
            yield event, _numbers(event.argument, event.env)


def _numbers(expr: ast.expr, env: Env) -> list[ast.expr]:
    """Return the plain numbers in a returned value: `loss.item()`, not the loss itself."""
    if isinstance(expr, ast.Call) and last_part(expr.func)[:1].isupper():
        expr = ast.Tuple([*expr.args, *(k.value for k in expr.keywords)])  # A named tuple.
    values = [value for value, _ in _values([expr], env)]
    return [v for v in values if any(is_call(n, "item", "float", "tolist") for n in walk(v))]


def _where(event: Event, value: ast.expr, env: Env, window: LoopWindow, file: File) -> ast.AST:
    """Return the call, or the statement that computed its value if a helper makes the call."""
    function = _function_of(window, file)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return event.node
    first, last = function.lineno, function.end_lineno or function.lineno
    if first <= event.line <= last:
        return event.node
    made = [d.node for d in env.get(text(value), ()) if d.node is not None]
    places = [n for n in (value, *made) if first <= int(getattr(n, "lineno", 0)) <= last]
    return places[0] if places else event.node


def _is_sink(call: ast.Call) -> bool:
    name = last_part(call.func)
    if "accum" in name:
        return False  # A helper that adds up.
    if isinstance(call.func, ast.Name) and _BAR.fullmatch(name):
        return len(call.args) > 1  # A callable progress bar: `pbar(step, {"loss": ...})`.
    owner = text(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if _SINK.fullmatch(name):
        return not _MATH.fullmatch(name) and owner not in {
            "math",
            "torch",
            "np",
            "numpy",
            "F",
            "jnp",
        }
    if name in {"append", "update", "add"} and owner:
        return bool(_KEEPERS.search(owner)) and bool(call.args)
    return bool(_WRITER.search(owner))


def _values(shown: list[ast.expr], env: Env) -> Iterator[tuple[ast.expr, Env]]:
    """Yield the values that are shown: through f-strings, dictionaries and `%`."""
    todo = [(a, env, 0) for a in shown]
    while todo:
        expr, where, depth = todo.pop(0)
        if depth > 5:
            continue
        made = where.get(expr.id, ()) if isinstance(expr, ast.Name) else ()
        held = [
            (d.expr, d.env, depth + 1)
            for d in made
            if isinstance(d.expr, (ast.Dict, ast.JoinedStr)) or is_call(d.expr, "dict")
        ]
        if held and len(held) == len(made):
            todo += held
            slots = [d for n, d in where.items() if n.startswith(f"{expr.id}[") and len(d) == 1]  # type: ignore[attr-defined]
            todo += [(d[0].expr, d[0].env, depth + 1) for d in slots]
            continue
        inner = _values_inside(expr)
        todo += [(i, where, depth + 1) for i in inner]
        if not inner:
            yield expr, where


def _values_inside(expr: ast.expr) -> list[ast.expr]:
    if isinstance(expr, ast.JoinedStr):
        return [v.value for v in expr.values if isinstance(v, ast.FormattedValue)]
    if isinstance(expr, ast.Dict):
        return expr.values
    if isinstance(expr, (ast.Tuple, ast.List)):
        return expr.elts
    if isinstance(expr, ast.Starred):
        return [expr.value]
    if is_binary(expr, ast.Mod):
        return [expr.right]
    if is_call(expr, "format", "dict"):
        return [*expr.args, *(k.value for k in expr.keywords)]
    return expr.args[:1] if is_call(expr, "float", "round", "str") else []


def _is_divided(chain: Chain, window: LoopWindow) -> bool:
    """True if it is divided by K and not multiplied by it again."""
    if any(window.is_count(f) for f in chain.factors):
        return False
    return any(window.counts(d) for d in chain.divisors)


def _is_multiplied(chain: Chain, window: LoopWindow) -> bool:
    """True if it is multiplied by K and nobody has divided it."""
    return not chain.divisors and any(window.is_count(f) for f in chain.factors)


def _is_inner(window: LoopWindow) -> bool:
    """True if the loop runs over the micro-batches of one batch, so that it ends with a window."""
    if window.shape == "nested":
        return True
    sliced = is_call(window.loop.iterable, "range") and len(window.loop.iterable.args) == 3
    return window.shape == "deepspeed" and sliced and bool(window.loop.parents)


def _is_last(event: Event, window: LoopWindow) -> bool:
    if _is_inner(window):
        return window.loop not in event.path
    return window.when(event) == "boundary"


def _kept_at_boundary(window: LoopWindow, bases: set[int]) -> Iterator[Report]:
    """Yield `running_loss += loss.item()` once per window: a mean over one micro-batch of each."""
    if window.shape != "boundary":
        return
    for event in window.of("augment"):
        name = dotted(event.receiver) if event.receiver is not None else None
        if name is None or "loss" not in name.lower() or window.when(event) != "boundary":
            continue
        if event.loops[-1] is not window.loop:
            continue  # An evaluation has losses of its own.
        same = [e for e in window.of("augment") if e.receiver and dotted(e.receiver) == name]
        if any(window.when(e) != "boundary" for e in same):
            continue  # The other micro-batches are added on another branch.
        if _loss_chains(event.argument, event.env, window, bases):
            yield Report(event.node, _LAST)
            return


def _averaged(window: LoopWindow, bases: set[int], file: File) -> Iterator[Report]:
    """Yield sums of a divided loss that are shown as `total / (number of micro-batches)`."""
    if window.shape == "nested":
        return
    for event in window.of("augment"):
        name = dotted(event.receiver) if event.receiver is not None else None
        if name is None or event.argument is None or window.when(event) != "always":
            continue
        chains = _loss_chains(event.argument, event.env, window, bases)
        if not any(_is_divided(c, window) for c in chains):
            continue
        means = _means_over_micro_batches(name, window, file)
        if means:
            yield Report(
                min(means, key=lambda node: int(getattr(node, "lineno", 0))),
                f"`{name}` adds up losses that were divided by `{window.count_name}`, and is "
                "divided by the number of micro-batches: it is that many times too small; add up "
                "the losses before the division",
            )
            return


def _means_over_micro_batches(name: str, window: LoopWindow, file: File) -> list[ast.AST]:
    counters = _micro_counters(window)
    nodes = list(walk(_function_of(window, file)))
    # `if n % every == 0: total / every` is a mean over micro-batches if `n` counts these.
    products = {
        text(node.right)
        for node in nodes
        if is_binary(node, ast.Mod)
        and (is_binary(node.right, ast.Mult) or _without_one(node.left) in counters)
    }
    restored = {
        id(node.left)
        for node in nodes
        if is_binary(node, ast.Mult) and window.is_count(text(node.right))
    }
    return [
        node
        for node in nodes
        if _divides_by_micro_batches(node, name, counters, products) and id(node) not in restored
    ]


def _divides_by_micro_batches(
    node: ast.AST, name: str, counters: set[str], products: set[str]
) -> bool:
    if not is_binary(node, ast.Div):
        return False
    left, right = text(node.left), text(strip_casts(node.right))
    if right in products:
        return bool(re.fullmatch(rf"{re.escape(name)}(\.item\(\)| - \w+)?", left))
    # Only the name itself: `(total - before) / steps` uses another count.
    if left not in {name, f"{name}.item()"} or is_accumulation_name(right):
        return False
    if re.fullmatch(r"len\([\w.]*(loader|dataloader|iterator|batches|dl)\)", right):
        return True
    return right in counters or any(right == f"{c} + 1" for c in counters)


def _without_one(expr: ast.expr) -> str:
    """Return `step` for `step + 1`."""
    return text(expr.left if is_binary(expr, ast.Add) and text(expr.right) == "1" else expr)


def _micro_counters(window: LoopWindow) -> set[str]:
    names: set[str] = set()
    target = window.loop.target
    counted = "enumerate" in text(window.loop.iterable or ast.Constant(value=""))
    if counted and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
        names.add(target.elts[0].id)
    for event in window.of("augment"):
        if not isinstance(event.stmt, ast.AugAssign) or window.when(event) != "always":
            continue
        if text(event.stmt.value) == "1":
            names.add(text(event.stmt.target))
    return names


def _function_of(window: LoopWindow, file: File) -> ast.AST:
    around = file.facts.functions_around(window.loop.node.lineno)
    return max(around, key=lambda f: f.lineno, default=file.tree)
