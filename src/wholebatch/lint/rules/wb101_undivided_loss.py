"""The loss of each micro-batch is added up without division by their number.

The gradient is K times that of the batch. Adam hides it; clipping, weight decay and SGD do not.
Divide the loss by the number of micro-batches before the backward.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import (
    divisor_of,
    dotted,
    is_accumulation_name,
    last_part,
    number,
    text,
)
from ..model.loss_origin import LOSS_NAME, Chain
from .rule_base import RESCALED, Report, cleared_last, rule

_SCALING_FACTOR = re.compile(r"(?<!loss_)scale(?!r)|accum|norm|inv|factor|gas|micro|steps", re.I)
# Weights of a term beside others: `(1 - ratio) * a + ratio * b` says nothing about the number.
_TERM_WEIGHT = re.compile(r"coef|(?<!1 - )(?<![\w.])[\w.]*ratio", re.I)
_SUMS = re.compile(r"reduction\s*=\s*['\"](sum|none)|size_average\s*=\s*False|\.sum\(", re.I)
# The size of the whole batch, handed to the loss.
_WHOLE_BATCH = re.compile(
    r"(total|global|num|n|all)_\w*(tokens|items|count|batch|samples)|normali[sz]er|denom"
)
# What is divided for a log: a clock; after the last backward also a loss.
_CLOCK = re.compile(r"step|iter|len\(|idx|epoch|batch_?size|\bi\b", re.I)
_MODEL = re.compile(r"model|net\b|network|crit|engine|\bl1", re.I)
# Losses that are normalised over the whole window elsewhere.
_NORMALISED_ELSEWHERE = ("accum_features", "num_items_in_batch", "GradCache", "grad_cache")
_BY_HAND = {"tensor", "native", "fabric", "lightning", "wrapper"}
_TEMPERATURES = {"T", "tau", "temp", "temperature"}


@rule("loss not divided")
def check(file: File) -> Iterator[Report]:
    """Yield one report per window whose loss is never divided."""
    if file.facts.mentions(RESCALED) or any(
        word in file.facts.source for word in _NORMALISED_ELSEWHERE
    ):
        return
    for window in file.accumulating:
        if not is_judged(window, file) or cleared_last(window):
            continue
        event, name = _first_undivided(window), window.count_name
        if event is not None:
            yield Report(
                event.node,
                f"loss is not divided by {name}: gradients of the micro-batches add up to "
                f"{name} times the mean; divide it before the backward",
            )


def is_judged(window: LoopWindow, file: File) -> bool:
    """True if the loop itself adds up the losses of a fixed number of micro-batches."""
    if window.shape not in {"boundary", "nested"} or not window.backwards:
        return False
    if window.boundary is not None and window.boundary.kind == "accelerate":
        return False
    # Gradients that are cleared on every micro-batch are those of one.
    if any(window.when(zero) == "always" for zero in window.of("zero")):
        return False
    # A window whose size changes during training normalises by something else.
    if window.every is not None and window.resolver.varies(window.every, window.loop):
        return False
    undivided = file.facts.accelerator_divides is False
    return all(
        e.detail in _BY_HAND or (e.detail == "accelerate" and undivided) for e in window.backwards
    )


def _first_undivided(window: LoopWindow) -> Event | None:
    """Return the first backward of a loss that is not divided, although the others may be."""
    chains: dict[Event, list[Chain]] = {}
    for event, chain in window.chains:
        if number(chain.base) is None:  # A term that is 0 unless it is switched on.
            chains.setdefault(event, []).append(chain)
    divided = any(window.counts(d) for _, chain in window.chains for d in chain.divisors)
    if not divided and _divides_by_count(window):
        return None
    for event, ways in chains.items():
        verdicts = {is_undivided(way, window) for way in ways}
        certain = True in verdicts and False not in verdicts
        # A second loss of the same micro-batch, beside one that is divided.
        others = [e for e in window.backwards if e is not event and not e.excludes(event)]
        is_extra = window.when(event) == "always" and bool(others)
        if certain and (not divided or is_extra):
            return event
    return None


def _divides_by_count(window: LoopWindow) -> bool:
    """True if something in the loop is divided by the count: it may scale the loss."""
    done = max(e.line for e in window.backwards)
    for node in ast.walk(window.loop.node):
        by = divisor_of(node)
        if by is None or not is_accumulation_name(text(by)):
            continue
        divided = text(node.left if isinstance(node, ast.BinOp) else node.target)  # type: ignore[attr-defined]
        is_logged = node.lineno > done and LOSS_NAME.search(divided)  # type: ignore[attr-defined]
        if not is_logged and not _CLOCK.search(divided):
            return True
    return False


def is_undivided(chain: Chain, window: LoopWindow) -> bool | None:
    """True if a way of the loss is a mean that nothing divides, False if not, None if unknown."""
    outer = [d for d in chain.divisors if not d.elementwise]
    if any(map(window.counts, chain.divisors)):
        return False
    if any(not (d.unrelated or window.is_own(d)) for d in outer):
        return False
    if any(map(_SCALING_FACTOR.search, chain.factors)):
        return False
    # Or the share of the micro-batch itself.
    weighed = any(window.resolver.varies(w, window.loop) for w in chain.weights)
    if weighed or any(map(_TERM_WEIGHT.search, chain.factors)):
        return None
    is_mean = any(window.is_own(d) for d in chain.divisors)
    if chain.base is None or ({"sum", "mean"} & chain.reducers == {"sum"} and not is_mean):
        return False
    call = chain.base_call
    spelled = f"{text(chain.base)} {text(call)}"
    if is_accumulation_name(spelled) or _divides_inside(chain.base):
        return False
    if "mean" in chain.reducers or is_mean:
        return True
    if call is None:
        return None
    return _is_mean(call, spelled, chain, window)


def _is_mean(call: ast.Call, spelled: str, chain: Chain, window: LoopWindow) -> bool | None:
    """True if a criterion or model gives a mean, as far as the file shows; None if unknown."""
    name = text(call.func)
    made = [text(d.expr) for d in chain.base_env.get(name, ())]
    if any(map(_SUMS.search, (spelled, *made, window.facts.class_of(name)))):
        return False
    if any(_WHOLE_BATCH.search(f"{k.arg}={text(k.value)}") for k in call.keywords):
        return False
    if not (_MODEL.search(name) or LOSS_NAME.search(name)):
        return None
    # The number of steps may be passed inside a settings object: `loss_of(batch, args)`.
    settings = (dotted(window.every) or "").partition(".")[0]
    is_known = _MODEL.search(last_part(call.func)) or LOSS_NAME.search(last_part(call.func))
    handed = bool(settings) and any(text(a) == settings for a in call.args)
    return bool(is_known) or not handed


def _divides_inside(base: ast.expr) -> bool:
    """True if a part of the loss that is not followed is divided: `(a * b / n).mean()`."""
    divisors = [divisor_of(node) for node in ast.walk(base)]
    return any(by is not None and last_part(by) not in _TEMPERATURES for by in divisors)
