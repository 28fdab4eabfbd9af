"""The scale of the loss: divided once by the number of micro-batches, by whoever accumulates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..normalise import Event
from ..normalise.file_index import ClassIndex
from ..normalise.syntax import (
    divisor_of,
    is_accumulation_name,
    keyword,
    last_part,
    names_in,
    number,
    shown,
    text,
    written,
)
from ..windows import File, Window
from ..windows.loss_terms import LOSS_NAME, Divisor, Term
from ..windows.values import integer, varies
from .rule_base import NOTE, Report, rule

# The criteria of torch, by their full names: their default is the mean.
_CRITERION = re.compile(
    r"torch\.(nn|nn\.functional|functional|nn\.modules\.loss)\.(\w+Loss|\w+_loss|kl_div|\w*cross_entropy\w*)"
)
_COMPUTES_LOSS = re.compile(r"model|net\b|network|crit|\bl1", re.I)
_BY_HAND = {"tensor", "fabric", "lightning"}
_TEMPERATURES = {"T", "tau", "temp", "temperature"}
# What is known of a term of the loss.
_MEAN, _LIKELY, _UNKNOWN, _DIVIDED = "mean", "likely a mean", "unknown", "divided"


@rule("WB101", "loss not divided", "error or note")
def loss_not_divided(file: File) -> Iterator[Report]:
    """The loss of each micro-batch is added up without division by their number.

    The gradient is K times that of the batch. Adam hides it; clipping, weight decay and SGD do
    not. Divide the loss by the number of micro-batches before the backward. It is a note where
    another file computes the loss, which may be a sum or divided there.
    """
    for window in file.accumulating:
        if not _adds_up(window):
            continue
        event, certain, by = _first_undivided(window)
        if event is None:
            continue
        name = window.count_name
        what = f"is divided by {by}, not by {name}" if by else f"is not divided by {name}"
        yield Report(
            event.node,
            f"loss {what}: the gradient is not the mean over the micro-batches of a window; "
            f"divide the loss by {name} before the backward",
            window.level if certain and not _is_handed_on(window) else NOTE,
        )


def _adds_up(window: Window) -> bool:
    """True if the loop itself adds up the losses of a fixed number of micro-batches."""
    if window.shape not in {"boundary", "nested"} or not window.backwards or window.rescaled_by:
        return False
    if window.boundary is not None and window.boundary.kind == "accelerate":
        return False
    # Gradients that are cleared on every micro-batch are those of one; a window whose size
    # changes during training normalises by something else.
    is_cleared = any(window.when(clear) == "always" for clear in window.of("clear"))
    known = {*_BY_HAND, *(["accelerate"] if window.accelerator_divides is False else [])}
    by_hand = all(e.detail in known for e in window.backwards)
    return by_hand and not is_cleared and not window.changes_size


def _is_handed_on(window: Window) -> bool:
    """True if code that is not seen may divide the gradients before the step."""
    steps = window.closing_steps()
    if window.is_by_hand or not steps:
        return True
    first, last = max(b.order for b in window.backwards), steps[-1].order
    optimizers = {s.owner for s in steps}
    events = [e for e in (*window.events, *window.after) if first < e.order < last]
    calls = [e.node for e in events if e.kind == "call"]
    handed = [text(a) for call in calls if isinstance(call, ast.Call) for a in call.args]
    return any(a in optimizers or "parameters()" in a for a in handed)


def _first_undivided(window: Window) -> tuple[Event | None, bool, str]:
    """Return the first backward of a loss that is not divided, although the others may be.

    The second value is True if that is certain; the third is a divisor that does not fit.
    """
    terms: dict[Event, list[Term]] = {}
    for event, term in window.terms:
        if number(term.base) is None:  # A term that is 0 unless it is switched on.
            terms.setdefault(event, []).append(term)
    divided = any(window.counts(d) for _, term in window.terms for d in term.divisors)
    for event, ways in terms.items():
        verdicts = {_verdict(way, window) for way in ways}
        if _DIVIDED in verdicts or not verdicts & {_MEAN, _LIKELY}:
            continue
        # A second loss of the same micro-batch, beside one that is divided.
        others = [e for e in window.backwards if e is not event and not e.excludes(event)]
        is_extra = window.when(event) == "always" and bool(others)
        if not divided or is_extra:
            wrong = [d for way in ways for d in way.divisors if _is_literal(d, window)]
            certain = verdicts == {_MEAN} and (not wrong or window.size is not None)
            by = f"`{wrong[0].written}`" if wrong and window.size is not None else ""
            return event, certain, by
    return None, False, ""


def _is_literal(divisor: Divisor, window: Window) -> bool:
    return integer(divisor.expr, window.file) is not None and not divisor.elementwise


def _verdict(term: Term, window: Window) -> str:
    """Return what is known of a term: that it is a mean which nothing divides, or not."""
    outer = [d for d in term.divisors if not d.elementwise]
    if any(map(window.counts, term.divisors)):
        return _DIVIDED
    if any(not (window.is_unrelated(d) or window.is_own(d)) for d in outer):
        return _DIVIDED
    if window.shape == "nested" and window.size is None and any(number(d.expr) for d in outer):
        return _DIVIDED  # By a literal that may be their number.
    is_mean = "mean" in term.reducers or any(window.is_own(d) for d in term.divisors)
    if "sum" in term.reducers and not is_mean:
        return _DIVIDED
    # A weight of a term, or the share of the micro-batch itself.
    if any(number(f) is None for f in term.factors):
        return _UNKNOWN
    if is_mean:
        return _UNKNOWN if _divides_inside(term.base) else _MEAN
    return _UNKNOWN if term.call is None else _kind_of(term.call, window)


def _kind_of(call: ast.Call, window: Window) -> str:
    """Return whether a criterion or model gives a mean, as far as the file shows."""
    makers = [call, *window.file.reader.made_by(call.func)]
    for maker in makers:
        reduction = keyword(maker, "reduction")
        if getattr(reduction, "value", "") in {"sum", "none"} or keyword(maker, "size_average"):
            return _DIVIDED
        if _CRITERION.fullmatch(window.file.index.full_name(maker.func)):
            return _MEAN if getattr(reduction, "value", "mean") == "mean" else _DIVIDED
    if is_accumulation_name(text(call)) or _divides_inside(call):
        return _DIVIDED
    name = text(call.func)
    if not (_COMPUTES_LOSS.search(name) or LOSS_NAME.search(name)):
        return _UNKNOWN
    # A number of the whole batch may be handed to it, or settings that hold the number of steps.
    options = [k.value for k in call.keywords if k.arg and not isinstance(k.value, ast.Constant)]
    fixed = [value for value in options if not varies(value, window.loop, window.file)]
    settings = window.every_key.partition(".")[0]
    return _UNKNOWN if fixed or settings in map(text, call.args) else _LIKELY


def _divides_inside(base: ast.expr) -> bool:
    """True if a part of the loss that is not followed is divided: `(a * b / n).mean()`."""
    divisors = [divisor_of(node) for node in ast.walk(base)]
    return any(by is not None and last_part(by) not in _TEMPERATURES for by in divisors)


@rule("WB102", "loss divided twice", "error or note")
def loss_divided_twice(file: File) -> Iterator[Report]:
    """The loss is divided by the accumulation steps, and the framework divides it again.

    Accelerate, Lightning and the transformers Trainer divide by themselves: the gradient is K times
    too small. Leave the division to the framework. It is a note where its settings are
    in another file.
    """
    reported: set[int] = set()
    for window in file.accumulating:
        for event, term in window.terms:
            counts = [d for d in term.divisors if window.counts(d)]
            if not counts or id(written(counts[0].node)) in reported:
                continue
            divides = window.shape == "accelerate" or window.accelerator_divides
            framework = "Accelerate" if event.detail == "accelerate" and divides else ""
            keys = [d.key for d in counts] + window.rescaled_by
            is_again = keys.count(keys[0]) > 1 and not term.factors
            if framework or is_again:
                reported.add(id(written(counts[0].node)))
                certain = is_again or window.every_key == counts[0].key
                level = window.level if certain else NOTE
                yield _twice(counts[0].node, counts[0].written, framework, level)
    for owner in file.normal.index.classes.values():
        yield from _divided_for_a_trainer(owner)


def _divided_for_a_trainer(owner: ClassIndex) -> Iterator[Report]:
    """Yield a division in what a Trainer of transformers or Lightning takes the loss from."""
    bases = {last_part(base) for base in owner.node.bases}
    names = names_in(owner.node)
    step = owner.methods.get("compute_loss") if bases & {"Trainer", "Seq2SeqTrainer"} else None
    framework = "the Trainer"
    if "LightningModule" in bases and "automatic_optimization" not in names:
        step, framework = owner.methods.get("training_step"), "Lightning"
    for node in ast.walk(step) if step is not None and "num_items_in_batch" not in names else ():
        by, is_logged = divisor_of(node), {"detach", "item"} & names_in(node)
        if by is None or is_logged or not LOSS_NAME.search(shown(node)):
            continue
        if is_accumulation_name(shown(by)):
            yield _twice(node, shown(by), framework, NOTE)


def _twice(node: ast.AST, count: str, framework: str, level: str) -> Report:
    if not framework:
        return Report(node, f"loss is divided by `{count}` twice: divide it once", level)
    message = (
        f"loss is divided by `{count}`, and {framework} divides it again: leave the division to it"
    )
    return Report(node, message, level)


@rule("WB119", "divided but stepped", "error or note")
def divided_but_stepped(file: File) -> Iterator[Report]:
    """The loss is divided by the accumulation steps, but every micro-batch makes an update.

    The gradient is K times too small, and nothing is accumulated. Step once every K micro-batches,
    or do not divide. It is a note where only a name says that the divisor counts micro-batches.
    """
    for window in file.shaped("plain"):
        steps = window.of("step")
        if window.loop.virtual or not steps or any(_may_wait(s, window) for s in steps):
            continue
        event, off = window.backwards[0], window.accelerator_divides is False
        if any(e.loops[-1] is not window.loop for e in window.backwards):
            continue  # Several backwards make one update.
        # By Accelerate's own number, if it has none, is by 1.
        counts = [d for _, t in window.terms for d in t.divisors if window.counts(d)]
        counts = [d for d in counts if not (off and "accelerator." in d.key)]
        if counts:
            name = counts[0].written
            yield Report(
                counts[0].node,
                f"loss is divided by `{name}`, but the optimizer steps on every micro-batch: the "
                f"gradient is `{name}` times too small; step once every `{name}` micro-batches",
                NOTE,
            )
        elif (
            event.detail == "accelerate"
            and window.accelerator_divides
            and not window.asks_to_accumulate  # Perhaps in a context manager of the file's own.
        ):
            yield Report(
                event.node,
                "Accelerate divides this loss by its `gradient_accumulation_steps`, but "
                "without `accelerator.accumulate(model)` every micro-batch makes an update: "
                "wrap the body of the loop in it",
            )


def _may_wait(step: Event, window: Window) -> bool:
    """True if anything on the way to a step may be a boundary that is not understood."""
    return window.when(step) != "always" or any(
        condition.origin in {"skip", "break"} or is_accumulation_name(text(condition.test))
        for condition in step.conditions(window.loop)
    )
