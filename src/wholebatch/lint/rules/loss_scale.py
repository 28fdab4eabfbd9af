"""The scale of the loss: divided once by the number of micro-batches, by whoever accumulates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import (
    divisor_of,
    dotted,
    is_accumulation_name,
    keyword,
    last_part,
    names_in,
    number,
    text,
)
from ..model.loss_origin import LOSS_NAME, Chain
from .rule_base import Report, cleared_last, framework_steps, rescales, rule

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
_NORMALISED_ELSEWHERE = {"accum_features", "num_items_in_batch", "GradCache", "grad_cache"}
_BY_HAND = {"tensor", "native", "fabric", "lightning", "wrapper"}
_TEMPERATURES = {"T", "tau", "temp", "temperature"}


@rule("WB101", "loss not divided")
def loss_not_divided(file: File) -> Iterator[Report]:
    """The loss of each micro-batch is added up without division by their number.

    The gradient is K times that of the batch. Adam hides it; clipping, weight decay and SGD do
    not. Divide the loss by the number of micro-batches before the backward.
    """
    for window in file.accumulating:
        if not is_judged(window) or rescales(window) or cleared_last(window):
            continue
        event, name = _first_undivided(window), window.count_name
        if event is not None:
            yield Report(
                event.node,
                f"loss is not divided by {name}: gradients of the micro-batches add up to "
                f"{name} times the mean; divide it before the backward",
            )


def is_judged(window: LoopWindow) -> bool:
    """True if the loop itself adds up the losses of a fixed number of micro-batches."""
    if window.shape not in {"boundary", "nested"} or not window.backwards:
        return False
    if window.boundary is not None and window.boundary.kind == "accelerate":
        return False
    if not window.words.isdisjoint(_NORMALISED_ELSEWHERE):
        return False
    # Gradients that are cleared on every micro-batch are those of one.
    if any(window.when(clear) == "always" for clear in window.of("clear")):
        return False
    # A window whose size changes during training normalises by something else.
    if window.changes_size:
        return False
    undivided = window.around.accelerator_divides is False
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
        verdicts = {_is_undivided(way, window) for way in ways}
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


def _is_undivided(chain: Chain, window: LoopWindow) -> bool | None:
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
    return None if call is None else _is_mean(call, spelled, chain, window)


def _is_mean(call: ast.Call, spelled: str, chain: Chain, window: LoopWindow) -> bool | None:
    """True if a criterion or model gives a mean, as far as the file shows; None if unknown."""
    name = text(call.func)
    makers = [text(d.expr) for d in chain.base_env.get(name, ())]
    if any(map(_SUMS.search, (spelled, *makers, window.facts.class_of(name)))):
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


@rule("WB102", "loss divided twice")
def loss_divided_twice(file: File) -> Iterator[Report]:
    """The loss is divided by the accumulation steps, and the framework divides it again.

    Accelerate, Lightning, DeepSpeed and the transformers Trainer divide by themselves: the gradient
    is K times too small. Leave the division to the framework.
    """
    for window in file.accumulating:
        yield from _divided_again(window)
    for methods, framework in framework_steps(file):
        for node in ast.walk(methods[0]):
            by = divisor_of(node)
            if by is None or {"detach", "item"} & names_in(node):
                continue  # Not divided, or for a log.
            if is_accumulation_name(text(by)):
                yield _twice(node, text(by), framework)
                break


def _divided_again(window: LoopWindow) -> Iterator[Report]:
    reported: set[ast.AST] = set()
    # An engine's backward may be on another branch than the steps of the loop.
    engines = [e for e in window.inner if e.detail in {"deepspeed", "engine"}]
    chains = [(e, c) for e in engines for c in window.ways(e)]
    for event, chain in (*window.chains, *chains):
        counts = [d for d in chain.divisors if window.counts(d)]
        if not counts or counts[0].node in reported:
            continue
        by = _framework(event, window)
        if by or (len(counts) > 1 and counts[0].key == counts[1].key):
            reported.add(counts[0].node)
            yield _twice(counts[0].node, counts[0].written, by)


def _twice(node: ast.AST, count: str, framework: str) -> Report:
    if not framework:
        return Report(node, f"loss is divided by `{count}` twice: divide it once")
    return Report(
        node,
        f"loss is divided by `{count}`, and {framework} divides it again: leave the division to it",
    )


def _framework(event: Event, window: LoopWindow) -> str:
    """Return the framework whose backward this is, if it divides the loss; or ""."""
    if event.detail == "tensor":
        return ""
    if event.detail in {"deepspeed", "engine"}:
        imports = window.facts.imports.values()
        known = event.detail == "deepspeed" or any("deepspeed" in i for i in imports)
        scales = keyword(event.node, "scale_wrt_gas") if isinstance(event.node, ast.Call) else None
        kept = text(scales) == "False" or _leaves_it_to_the_loop(window) or _steps_once(window)
        return "DeepSpeed" if known and not kept else ""
    divides = window.shape == "accelerate" or (
        event.detail == "accelerate" and window.around.accelerator_divides
    )
    return "Accelerate" if divides else ""


def _leaves_it_to_the_loop(window: LoopWindow) -> bool:
    """True if the configuration of an engine is found here, and all of it says 1."""
    return bool(window.around.engine_steps) and all(
        number(n) == 1 for n in window.around.engine_steps
    )


def _steps_once(window: LoopWindow) -> bool:
    """True if the loop steps the engine once per window, and nothing here tells it their size."""
    steps = window.of("engine_step")
    once = window.shape == "boundary" and any(map(window.ends_window, steps))
    if window.shape != "boundary":
        steps += [e for e in window.after if e.kind == "engine_step"]
        depth = min((len(e.loops) for e in window.backwards), default=0)
        once = bool(steps) and all(len(e.loops) < depth for e in steps)
    return once and not window.around.engine_steps


@rule("WB119", "divided but stepped")
def divided_but_stepped(file: File) -> Iterator[Report]:
    """The loss is divided by the accumulation steps, but every micro-batch makes an update.

    The gradient is K times too small, and nothing is accumulated. Step once every K micro-batches,
    or do not divide.
    """
    for window in file.shaped("plain"):
        steps = window.of("step")
        if window.loop.virtual or not steps or any(_may_wait(s, window) for s in steps):
            continue
        yield from _by_hand(window)
        yield from _by_accelerate(window)


def _may_wait(step: Event, window: LoopWindow) -> bool:
    """True if anything on the way to a step may be a boundary that is not understood."""
    return window.when(step) != "always" or any(
        guard.origin in {"skip", "break"} or is_accumulation_name(text(guard.expr))
        for guard in step.guards(window.loop)
    )


def _by_hand(window: LoopWindow) -> Iterator[Report]:
    for _, chain in window.chains:
        counts = [d for d in chain.divisors if window.counts(d)]
        off = window.around.accelerator_divides is False  # By its own number, which is 1.
        counts = [d for d in counts if not (off and "accelerator." in d.key)]
        # The parts of one loss, added up by a loop inside.
        counts = [d for d in counts if not _in_inner_loop(d.node, window)]
        if counts and not chain.factors:
            name = counts[0].written
            yield Report(
                counts[0].node,
                f"loss is divided by `{name}`, but the optimizer steps on every micro-batch: the "
                f"gradient is `{name}` times too small; step once every `{name}` micro-batches",
            )
            return


def _in_inner_loop(node: ast.AST, window: LoopWindow) -> bool:
    line = getattr(node, "lineno", 0)
    inner = [n for n in ast.walk(window.loop.node) if isinstance(n, (ast.For, ast.While))]
    return any(
        n is not window.loop.node and n.lineno < line <= (n.end_lineno or line) for n in inner
    )


def _by_accelerate(window: LoopWindow) -> Iterator[Report]:
    """Yield a backward that Accelerate divides, in a loop that it does not accumulate."""
    details = {e.detail for e in window.backwards}
    if any(e.loops[-1] is not window.loop for e in window.backwards):
        return  # Several backwards make one update.
    if "accumulate" in window.around.calls:
        return  # Somewhere else, perhaps in a context manager of the file's own.
    if details == {"accelerate"} and window.around.accelerator_divides:
        yield Report(
            window.backwards[0].node,
            "Accelerate divides this loss by its `gradient_accumulation_steps`, but without "
            "`accelerator.accumulate(model)` every micro-batch makes an update: wrap the body of "
            "the loop in it",
        )
