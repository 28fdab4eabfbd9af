"""The ends of windows: the condition that closes one, and the short last one of an epoch."""

from __future__ import annotations

from collections.abc import Iterator

from ..normalise import Condition, Event
from ..normalise.syntax import keyword, text
from ..windows import File, Window
from ..windows.boundary import Boundary
from ..windows.values import iterated, length, varies
from .rule_base import NOTE, Report, rule


@rule("WB109", "tail of the epoch", "error or note")
def short_last_window(file: File) -> Iterator[Report]:
    """The short last window is dropped, leaks, or is divided by the nominal count.

    If the loader's length is no multiple of K, the last micro-batches of each epoch have no update
    of their own, or one that is too small. Step once after the loader ends, and divide by the
    number of micro-batches that are left. It is an error only where the file itself shows the
    length, and a remainder.
    """
    for window in file.accumulating:
        boundary = window.boundary
        if boundary is None or not _ends_short(window, boundary):
            continue
        if keyword(window.accelerator, "deepspeed_plugin") is not None:
            continue  # DeepSpeed counts its own windows, over all epochs.
        handled = boundary.tail or bool(_after(window, "step"))
        if boundary.spanning and not handled and not _is_cleared_before(window):
            continue
        items = length(iterated(window.loop, window.file), window.file)
        rest = items % window.size if items is not None and window.size else None
        message = _mistake(window, boundary, handled=handled)
        if message and rest != 0:
            # Accelerate and Fabric share the batches among ranks: then the length is another.
            shared = {"prepare", "setup_dataloaders"} & window.file.index.calls_by_name.keys()
            certain = rest and boundary.shift == 0 and window.loop.parents and not shared
            shown = f" ({items} micro-batches leave {rest})" if rest else ""
            yield Report(boundary.test, message + shown, window.level if certain else NOTE)


def _mistake(window: Window, boundary: Boundary, *, handled: bool) -> str:
    """Return what becomes of the short last window, or "" if it is treated right."""
    name = window.count_name
    if handled:
        if window.rescaled_by or not _is_nominal(window):
            return ""
        return (
            f"the short last window is divided by the nominal {name}, not by the micro-batches "
            f"that it has: multiply its gradient by {name} over that number, or drop it"
        )
    if {window.every_key, boundary.written.rpartition(".")[2]} & window.file.index.multiples:
        return ""
    fate = "dropped" if _is_cleared_before(window) else "left over for the next window"
    return (
        f"micro-batches after the last multiple of {name} make no update: at the end of the "
        f"loader they are {fate}; step once more after the loop, divided by the number of "
        "micro-batches that are left"
    )


def _ends_short(window: Window, boundary: Boundary) -> bool:
    """True if only the count ends windows, and the loader can end before the count is full."""
    if window.shape != "boundary" or boundary.partial:
        return False
    # A step after a loop of unknown length, if something is left over, shows that the loop ends.
    paths = [e.path for e in _after(window, "step")]
    rests = [item for path in paths for item in path if isinstance(item, Condition)]
    flushed = any("%" in text(c.test) for c in rests) and not _after(window, "backward")
    return window.finite or flushed


def _after(window: Window, kind: str) -> list[Event]:
    """Return the events of a kind behind the loop, in a loop around it or in none."""
    parents = window.loop.parents
    around = [parents[:depth] for depth in range(len(parents) + 1)]
    return [e for e in window.after if e.kind == kind and e.loops in around]


def _is_nominal(window: Window) -> bool:
    return any(
        window.every_key == d.key and not varies(d.expr, window.loop, window.file)
        for _, term in window.terms
        for d in term.divisors
    )


def _is_cleared_before(window: Window) -> bool:
    return window.is_per_epoch and any(e.kind == "clear" for e in window.before)


@rule("WB110", "boundary off by one", "error or note")
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
                boundary.test,
                f"boundary is off by one: the first window has {words} instead of {name}; "
                "count micro-batches from 1",
                window.level,
            )


def _first_window(window: Window, boundary: Boundary, shift: int) -> str:
    """Return the error in the first window's size: "" if none, "one", "+ 1", "- 1" and so on."""
    steps = window.closing_steps()
    # A step at the top of the body closes the window of the iterations before.
    if steps and window.backwards and steps[0].order < window.backwards[0].order:
        shift = 0 if boundary.after_first else shift - 1
    elif shift == 1 and boundary.kind == "modulo" and not boundary.after_first:
        return "one"
    return f"{'+' if shift > 0 else '-'} {abs(shift)}" if shift else ""
