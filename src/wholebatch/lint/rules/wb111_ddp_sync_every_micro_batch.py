"""Gradients are reduced over the network for every micro-batch, or held too late.

DistributedDataParallel sends all gradients in every backward: K times the traffic for the same
update. Run all but the last micro-batch of a window, forward and backward, under `no_sync()`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import MODEL_NAME, Context, Guard, holds_sync
from ..model.expressions import is_accumulation_name, is_call, is_not, last_part, text
from ..model.window_boundary import of_guard
from .rule_base import Report, rule, steps_every_micro_batch

_HELD = re.compile(
    r"no_sync|require_backward_grad_sync|no_backward_sync|disable_allreduce|set_requires_gradient_sync|ddp_sync"
)

_WRAPS = re.compile(r"DistributedDataParallel|(Native|Apex|Torch)?DDP|(smart|wrap\w*)_(DDP|ddp)")
_LOCAL = {"tensor", "native", "wrapper", "lightning"}


@rule("DDP synchronises every micro-batch")
def check(file: File) -> Iterator[Report]:
    """Yield windows under DDP that never disable the synchronisation, or do so too late."""
    windows = file.shaped("boundary", "nested")
    wraps = _wraps(file) if windows else []
    for window in windows:
        if wraps and not file.facts.mentions(_HELD):
            local = {e.detail for e in window.backwards} <= _LOCAL
            wrapped = any(_belongs(call, window) for call in wraps)
            if wrapped and local and not steps_every_micro_batch(window):
                yield Report(
                    window.backwards[0].node,
                    "DistributedDataParallel reduces the gradients on every micro-batch: hold it "
                    "with `no_sync()` for all but the last of a window",
                )
            continue
        wrong = _reduces_wrongly(window)
        if wrong is not None:
            yield Report(
                wrong,
                "gradients are not reduced on the last micro-batch of each window: hold the "
                f"reduction on all others, by the rest of the division by {window.count_name}",
            )
            continue
        # FSDP decides in the backward.
        sharded = file.facts.wraps_fsdp and not wraps
        late = None if sharded else _late_flag(window) or _late_context(window)
        if late is not None:
            yield Report(
                late.node,
                "synchronisation is held after the forward that reads it: DDP decides in the "
                "forward, so it must be inside `no_sync()` or after the flag is set",
            )


def _belongs(call: ast.Call, window: LoopWindow) -> bool:
    """True unless the model is wrapped in another function that trains by itself."""
    facts = window.facts
    wrapping = facts.functions_around(call.lineno)
    training = facts.functions_around(window.loop.node.lineno)
    if not wrapping or not training or not facts.relevant.intersection(wrapping):
        return True
    pairs = [(a, b) for a in wrapping for b in training]
    return any(a is b or facts.reaches(a, b) or facts.reaches(b, a) for a, b in pairs)


def _wraps(file: File) -> list[ast.Call]:
    """Return the calls that wrap a model, except where nothing is accumulated (as with apex)."""
    wraps = [c for c in file.facts.calls if _WRAPS.fullmatch(last_part(c.func))]
    # A teacher is wrapped but not trained.
    trained = [c for c in wraps if not (c.args and "teacher" in text(c.args[0]).lower())]
    otherwise = {
        id(call)
        for node in (ast.walk(file.tree) if trained else ())
        if isinstance(node, ast.If)
        and is_not(node.test)
        and is_accumulation_name(text(node.test.operand))
        for stmt in node.body
        for call in ast.walk(stmt)
    }
    return [call for call in trained if id(call) not in otherwise]


def _reduces_wrongly(window: LoopWindow) -> ast.expr | None:
    """Return a condition that does not reduce at the end of each window.

    It is the opposite of the boundary, or compares a position in the loader with the number of
    micro-batches, as in `i == k - 1`: that is the end of the first window only.
    """
    flags = [(f.argument, f.env, True) for f in window.of("ddp_flag") if f.argument is not None]
    held = [c for b in window.backwards for c in b.contexts(window.loop) if holds_sync(c)]
    for context in held:
        for node in ast.walk(context.expr):
            if isinstance(node, ast.IfExp):
                flags.append((node.test, context.env, "no_sync" not in text(node.body)))
    for expr, env, positive in flags if window.shape == "boundary" else ():
        resolved = window.resolver.resolve(expr, env)
        known = of_guard(Guard(expr, env, positive), window.loop, window.resolver)
        counts = window.every_key in text(resolved) and "%" not in text(resolved)
        kinds = {s.kind for s in window.resolver.symbols_in(resolved) if s.loop is window.loop}
        if known is None and counts and kinds == {"target"}:
            return expr
        if known is not None and known.inverse and window.is_ours(known):
            return expr
    return None


def _late_flag(window: LoopWindow) -> Event | None:
    for flag in window.of("ddp_flag"):
        # Only forwards of the same model count, and none may follow the flag.
        model = flag.receiver_text
        forwards = [
            f for f in window.of("forward") if f"{f.receiver_text}.".startswith(f"{model}.")
        ]
        is_late = bool(forwards) and all(f.order < flag.order for f in forwards)
        if is_late and any(b.order > flag.order for b in window.backwards):
            return flag
    return None


def _late_context(window: LoopWindow) -> Event | None:
    for backward in window.backwards:
        contexts = [c for c in backward.contexts(window.loop) if holds_sync(c)]
        held = [c for c in contexts if not _is_read_in_backward(c)]
        if not held:
            continue
        owner = held[-1]
        made = {id(chain.base_call) for chain in window.ways(backward)}
        calls = [e for e in window.of("call") if id(e.node) in made]
        forwards = [*window.of("forward"), *calls]
        inside = [f for f in forwards if owner in f.path]
        before = [f for f in forwards if owner not in f.path and f.order < backward.order]
        around = [c for f in before for c in f.path if isinstance(c, Context)]
        if not inside and before and not any(holds_sync(c) for c in around):
            return backward
    return None


def _is_read_in_backward(context: Context) -> bool:
    """True for `booster.no_sync(model)`, of an engine, and `bucketer.no_sync()`, of own hooks."""
    calls = [n for n in ast.walk(context.expr) if is_call(n, "no_sync")]
    owners = [last_part(c.func.value) for c in calls if isinstance(c.func, ast.Attribute)]
    is_model = any(MODEL_NAME.match(o) or "ddp" in o.lower() for o in owners)
    return any(c.args for c in calls) or (bool(owners) and not is_model)
