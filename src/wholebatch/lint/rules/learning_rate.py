"""The learning rate's schedule: one step per update."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..normalise import Event
from ..normalise.syntax import (
    is_accumulation_name,
    is_binary,
    is_call,
    last_part,
    shown,
    text,
    values_of,
    written,
)
from ..windows import File, Window
from ..windows.values import iterated
from .rule_base import NOTE, Report, rule


@rule("WB107", "scheduler stepped every micro-batch", NOTE)
def scheduled_every_micro_batch(file: File) -> Iterator[Report]:
    """The learning-rate schedule steps for every micro-batch instead of every update.

    The schedule goes K times too fast: warm-up and decay end after 1/K of the training. Step it
    where the optimizer steps. It is a note, since a schedule may be made for micro-batches.
    """
    for window in file.shaped("boundary", "nested", "accelerate"):
        for event in window.of("schedule"):
            call = event.node
            has_argument = isinstance(call, ast.Call) and bool(call.args or call.keywords)
            if window.when(event) != "always" or has_argument:
                continue
            if window.shape == "accelerate" and _may_be_prepared(event, window):
                continue
            makers = window.file.reader.made_by(event.receiver)
            if any(_may_count_micro_batches(maker, window) for maker in makers):
                continue
            yield Report(
                call,
                f"`{shown(written(call))}` runs on every micro-batch: the schedule goes "
                f"{window.count_name} times too fast; step it once per update",
                NOTE,
            )


def _may_be_prepared(event: Event, window: Window) -> bool:
    """True unless it is clear that Accelerate does not wrap a schedule, and step it per update."""
    by_name = window.file.index.calls_by_name
    calls = [*by_name.get("prepare", ()), *by_name.get("prepare_scheduler", ())]
    makers = {last_part(call.func) for call in window.file.reader.made_by(event.receiver)}
    handed = {last_part(a) for call in calls for a in call.args}
    starred = any(isinstance(a, ast.Starred) for call in calls for a in call.args)
    prepared = bool({"prepare", "prepare_scheduler"} & makers)
    return (
        prepared
        or starred
        or not calls
        or last_part(event.receiver and written(event.receiver)) in handed
    )


def _may_count_micro_batches(call: ast.Call, window: Window) -> bool:
    """True if a schedule is, or may be, as long as the micro-batches: then each may step it."""
    if last_part(call.func) == "LambdaLR":
        return True  # A function of the step may count whatever it likes.
    file, over = window.file, iterated(window.loop, window.file)
    limit = text(over.args[-1]) if is_call(over, "range") and over.args else ""
    parts = [part for value in values_of(call) for part in ast.walk(file.value(value) or value)]
    if limit[:1].isalpha() and limit in map(text, parts):
        return True
    if any(is_binary(p, ast.Mult) and is_accumulation_name(text(p)) for p in parts):
        return True  # Updates times their micro-batches: `max_train_steps * args.accum`.
    names = " ".join(shown(written(part)) for part in parts if isinstance(part, ast.expr))
    return "len(" in names and not is_accumulation_name(names)
