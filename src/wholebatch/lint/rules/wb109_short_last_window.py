"""The short last window is dropped, leaks, or is divided by the nominal count.

If the loader's length is no multiple of K, the last micro-batches of each epoch have no update of
their own, or one that is too small. Step once after the loader ends, and divide by the number of
micro-batches that are left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Guard
from ..model.expressions import keyword, text
from ..model.window_boundary import Boundary
from .rule_base import RESCALED, Report, cleared_last, rule


@rule("tail of the epoch")
def check(file: File) -> Iterator[Report]:
    """Yield at most one report per window."""
    call = file.facts.accelerator
    if call is not None and keyword(call, "deepspeed_plugin") is not None:
        return  # DeepSpeed counts its own windows, over all epochs.
    for window in file.accumulating:
        boundary = window.boundary
        if boundary is None or not _ends_short(window, boundary) or cleared_last(window):
            continue
        handled = boundary.tail or bool(_after(window, "step"))
        if boundary.spanning and not handled and not _cleared_before(window):
            continue
        if handled and _nominal(window) and not file.facts.mentions(RESCALED):
            yield Report(
                boundary.expr,
                f"the short last window is divided by the nominal {window.count_name}, not "
                "by the micro-batches that it has: multiply its gradient by "
                f"{window.count_name} over that number, or drop it",
            )
        elif not handled and not _is_multiple(window):
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


def _after(window: LoopWindow, kind: str) -> list[Event]:
    """Return the events of a kind behind the loop, in a loop around it or in none."""
    parents = window.loop.parents
    around = [parents[:depth] for depth in range(len(parents) + 1)]
    return [e for e in window.after if e.kind == kind and e.loops in around]


def _is_multiple(window: LoopWindow) -> bool:
    """True if the file itself makes the loader's length a multiple of the window."""
    words = re.findall(r"\w+", window.every_name)
    name = words[-1] if words else ""
    pattern = rf"len\([^)\n]*\)\s*%\s*[^)\n]*{name}|//\s*[\w.]*{name}\s*\)?\s*\*\s*[\w.]*{name}"
    return window.facts.mentions(re.compile(pattern))


def _nominal(window: LoopWindow) -> bool:
    return any(
        d.key == window.every_name and not window.resolver.varies(d.expr, window.loop)
        for _, chain in window.chains
        for d in chain.divisors
    )


def _cleared_before(window: LoopWindow) -> bool:
    around = window.facts.functions_around(window.loop.node.lineno)
    per_epoch = any("epoch" in f"{f.name} {text(f.args)}" for f in around[-1:])
    cleared = any(e.kind == "zero" for e in window.before)
    return cleared and (bool(window.loop.parents) or per_epoch)
