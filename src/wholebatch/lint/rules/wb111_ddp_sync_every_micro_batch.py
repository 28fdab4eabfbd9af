"""Gradients are reduced over the network for every micro-batch, or held too late.

DistributedDataParallel sends all gradients in every backward: K times the traffic for the same
update. Run all but the last micro-batch of a window, forward and backward, under `no_sync()`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import MODEL_NAME, Context, holds_sync
from ..model.expressions import is_accumulation_name, is_call, is_not, last_part, text
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
            if local and not steps_every_micro_batch(window):
                yield Report(
                    window.backwards[0].node,
                    "DistributedDataParallel reduces the gradients on every micro-batch: hold it "
                    "with `no_sync()` for all but the last of a window",
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
