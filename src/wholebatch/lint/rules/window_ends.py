"""The ends of windows: the condition that closes one, and the short last one of an epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Guard
from ..model.expressions import is_binary, is_call, keyword, names_in, text
from ..model.surroundings import Surroundings
from ..model.window_boundary import Boundary
from .rule_base import Report, cleared_last, closing_steps, rescales, rule


@rule("WB109", "tail of the epoch")
def short_last_window(file: File) -> Iterator[Report]:
    """The short last window is dropped, leaks, or is divided by the nominal count.

    If the loader's length is no multiple of K, the last micro-batches of each epoch have no update
    of their own, or one that is too small. Step once after the loader ends, and divide by the
    number of micro-batches that are left.
    """
    for window in file.accumulating:
        boundary, accelerator = window.boundary, window.around.accelerator
        if accelerator is not None and keyword(accelerator, "deepspeed_plugin") is not None:
            continue  # DeepSpeed counts its own windows, over all epochs.
        if boundary is None or not _ends_short(window, boundary) or cleared_last(window):
            continue
        if any(_leaves_out_rest(backward, window) for backward in window.backwards):
            continue
        handled = boundary.tail or bool(_after(window, "step"))
        if boundary.spanning and not handled and not _cleared_before(window):
            continue
        if handled and _nominal(window) and not rescales(window):
            yield Report(
                boundary.expr,
                f"the short last window is divided by the nominal {window.count_name}, not "
                "by the micro-batches that it has: multiply its gradient by "
                f"{window.count_name} over that number, or drop it",
            )
        elif not handled and window.every_name.rpartition(".")[2] not in window.around.ask(
            _rounded
        ):
            fate = "dropped" if _cleared_before(window) else "left over for the next window"
            yield Report(
                boundary.expr,
                f"micro-batches after the last multiple of {window.count_name} make no update: at "
                f"the end of the loader they are {fate}; step once more after the loop, divided "
                "by the number of micro-batches that are left",
            )


def _ends_short(window: LoopWindow, boundary: Boundary) -> bool:
    """True if only the count ends windows, and the loader can end before the count is full."""
    if window.shape != "boundary" or not boundary.pure:
        return False
    # A step after a loop of unknown length, if something is left over, shows that the loop ends.
    rests = [g for e in _after(window, "step") for g in e.path if isinstance(g, Guard)]
    flushed = any("%" in text(g.expr) for g in rests) and not _after(window, "backward")
    return window.finite or flushed


def _leaves_out_rest(backward: Event, window: LoopWindow) -> bool:
    """True if no short window begins: `if i // k >= updates: continue`."""
    guards = [g for g in backward.guards(window.loop) if g.origin in {"skip", "break"}]
    resolved = [text(window.resolver.resolve(g.expr, g.env)) for g in guards]
    return any(f"// {window.every_key}" in condition for condition in resolved)


def _after(window: LoopWindow, kind: str) -> list[Event]:
    """Return the events of a kind behind the loop, in a loop around it or in none."""
    parents = window.loop.parents
    around = [parents[:depth] for depth in range(len(parents) + 1)]
    return [e for e in window.after if e.kind == kind and e.loops in around]


def _rounded(around: Surroundings) -> set[str]:
    """Return the numbers that lengths are made a multiple of: `len(loader) % k`, `n // k * k`."""
    names: set[str] = set()
    for node in around.nodes:
        if is_binary(node, ast.Mod) and is_call(node.left, "len"):
            names |= {*names_in(node.right), text(node.right)}
        if is_binary(node, ast.Mult) and is_binary(node.left, ast.FloorDiv):
            names |= {*names_in(node.right), text(node.right)} & {
                *names_in(node.left.right),
                text(node.left.right),
            }
    return names


def _nominal(window: LoopWindow) -> bool:
    return any(
        d.key == window.every_name and not window.resolver.varies(d.expr, window.loop)
        for _, chain in window.chains
        for d in chain.divisors
    )


def _cleared_before(window: LoopWindow) -> bool:
    around = window.facts.functions_around(window.loop.node.lineno)
    per_epoch = any("epoch" in f"{f.name} {text(f.args)}" for f in around[-1:])
    cleared = any(e.kind == "clear" for e in window.before)
    return cleared and (bool(window.loop.parents) or per_epoch)


@rule("WB110", "boundary off by one")
def boundary_off_by_one(file: File) -> Iterator[Report]:
    """The condition that ends a window is true one micro-batch too early or too late.

    `i % K == 0` with an `i` from 0 makes an update of the first micro-batch alone, and shifts all
    windows. Count micro-batches from 1: `(i + 1) % K == 0`.
    """
    for window in file.shaped("boundary"):
        boundary = window.boundary
        if boundary is None or boundary.shift is None or boundary.kind not in {"modulo", "reset"}:
            continue
        if window.changes_size:
            continue  # A window that grows may begin with one micro-batch on purpose.
        size = _first_window(window, boundary, boundary.shift)
        if size:
            name = window.count_name
            words = "one micro-batch" if size == "one" else f"{name} {size} micro-batches"
            yield Report(
                boundary.expr,
                f"boundary is off by one: the first window has {words} instead of {name}; "
                "count micro-batches from 1",
            )


def _first_window(window: LoopWindow, boundary: Boundary, shift: int) -> str:
    """Return the error in the first window's size: "" if none, "one", "+ 1", "- 1" and so on."""
    steps = closing_steps(window)
    # A step at the top of the body closes the window of the iterations before.
    if steps and window.backwards and steps[0].order < window.backwards[0].order:
        shift = 0 if boundary.after_first else shift - 1
    elif shift == 1 and boundary.kind == "modulo" and not boundary.after_first:
        return "one"
    return f"{'+' if shift > 0 else '-'} {abs(shift)}" if shift else ""
