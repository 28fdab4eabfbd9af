"""The loss that is logged: that of the whole window, undivided."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Env
from ..model.expressions import dotted, is_binary, is_call, last_part, text, values_of
from ..model.loss_origin import Chain, trace
from .rule_base import LOG, Report, rule

# Functions that show or keep a number, and objects whose methods do.
_LOGS = re.compile(
    r"(\w+_)?print\w*|log|log(_|kv)\w*|info|debug|add_scalars?|set_postfix\w*|report\w*"
    r"|set_description\w*|scalar_summary|(update_|write_)?progress_?bar|\w+_log"
)
_KEEPS = re.compile(
    r"loss|meter|metric|avg|average|tracker|history|record|stat|^logs?$|writer|logger|wandb", re.I
)
_MATH = re.compile(r"log_(softmax|prob|sigmoid|every|likelihood|sum)\w*|\w*softmax\w*")
_NO_NUMBER = ("isnan", "isinf", "isfinite")
_MAX_DEPTH = 5


@rule("WB115", "reported loss", LOG)
def reported_loss(file: File) -> Iterator[Report]:
    """The loss that is logged is the divided one, or that of the last micro-batch.

    A loss divided by K for the backward is K times too small in the log. A loss logged only at the
    boundary is that of one micro-batch, not of the window. Log the mean of the undivided losses
    over the micro-batches of the window.
    """
    for window in file.accumulating:
        bases = _bases(window)
        reported: set[str] = set()
        for event, shown in _shown(window) if bases else ():
            traced = [trace(v, env, window.resolver) for v, env in _values(shown, event.env)]
            losses = [c for c in traced if all(id(way.base) in bases for way in c)]
            # Beside the loss itself, the divided one is shown for what it is.
            whole = any(all(not way.divisors for way in ways) for ways in losses)
            for chains in losses:
                message = _mistake(chains, event, window, whole=whole)
                if message and message not in reported:
                    reported.add(message)
                    yield Report(event.node, message)


def _bases(window: LoopWindow) -> set[int]:
    """Return the places where the losses of the window are computed; a setting is no loss."""
    bases = [(c.base, c.base_env) for _, c in window.chains if c.base is not None]
    return {
        id(base)
        for base, env in bases
        if dotted(base) is None
        or last_part(base).endswith("loss")
        or window.resolver.symbols_in(window.resolver.resolve(base, env))
    }


def _mistake(chains: list[Chain], event: Event, window: LoopWindow, *, whole: bool) -> str:
    """Return what is wrong with a logged loss, or ""."""
    # Multiplied back, perhaps only where the number is above 1.
    if any(window.is_count(f) for c in chains for f in c.factors):
        return ""
    if any(window.counts(d) for c in chains for d in c.divisors):
        if whole:
            return ""
        return (
            f"reported loss was divided by {window.count_name}: it is that many times too small; "
            "log the loss before the division, averaged over the window"
        )
    is_after = window.shape == "nested" and window.loop not in event.path
    if is_after or window.when(event) == "boundary":
        return (
            "reported loss is that of the last micro-batch, not of the window: log the mean over "
            "its micro-batches"
        )
    return ""


def _shown(window: LoopWindow) -> Iterator[tuple[Event, list[ast.expr]]]:
    """Yield the calls that log or keep a number, and what they are handed."""
    is_nested = window.shape == "nested"
    after = [e for e in window.after if is_nested and e.loops == window.loop.parents]
    # An inner loop, such as an evaluation, has losses of its own.
    for event in (*(e for e in window.events if e.loops[-1] is window.loop), *after):
        guards = [g.key[0] for g in event.guards(window.loop)]
        if any(word in guard for guard in guards for word in _NO_NUMBER):
            continue  # A warning about a loss that is no number.
        call = event.node
        if event.kind == "call" and isinstance(call, ast.Call) and _is_log(call, window):
            yield event, values_of(call)


def _is_log(call: ast.Call, window: LoopWindow) -> bool:
    name = last_part(call.func)
    owner = text(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if _LOGS.fullmatch(name):
        return not _MATH.fullmatch(name) and owner not in {"math", "torch", "np", "F"}
    if not _KEEPS.search(owner.rpartition(".")[2]) or not call.args:
        return False
    # `kept.append(loss)` where `sum(kept)` is used: the sum of a window's shares.
    sums = window.around.calls.get("sum", ())
    is_summed = any(text(c.args[0]) == owner for c in sums if c.args)
    return name in {"append", "update", "add", "log"} and not is_summed


def _values(shown: list[ast.expr], env: Env) -> Iterator[tuple[ast.expr, Env]]:
    """Yield the values that are shown: through f-strings, dictionaries, `%` and names for them."""
    todo = [(value, env, 0) for value in shown]
    while todo:
        expr, where, depth = todo.pop(0)
        name = expr.id if isinstance(expr, ast.Name) else ""
        values = [d for d in where.get(name, ()) if isinstance(d.expr, (ast.Dict, ast.JoinedStr))]
        inner = [(d.expr, d.env) for d in values] or [(part, where) for part in _inside(expr)]
        if not inner:
            yield expr, where
        elif depth < _MAX_DEPTH:
            todo += [(part, env_of_part, depth + 1) for part, env_of_part in inner]


def _inside(expr: ast.expr) -> list[ast.expr]:
    if isinstance(expr, ast.JoinedStr):
        return [v.value for v in expr.values if isinstance(v, ast.FormattedValue)]
    if isinstance(expr, ast.Dict):
        return expr.values
    if isinstance(expr, (ast.Tuple, ast.List)):
        return expr.elts
    if is_binary(expr, ast.Mod):
        return [expr.right]
    if is_call(expr, "format", "dict"):
        return values_of(expr)
    return expr.args[:1] if is_call(expr, "float", "round", "str") else []
