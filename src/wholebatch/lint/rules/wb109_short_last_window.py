"""The last, short window of an epoch is dropped, leaks, or is divided by the wrong number.

## What it does
Finds loops over a finite loader whose windows end only at multiples of K and ignore the remaining
micro-batches, and loops that handle them but still divide by K.

## Why is this bad?
Up to K-1 micro-batches of every epoch are lost if gradients are cleared before the next epoch.
Otherwise they leak into the first window of the next epoch; those of the last epoch are never used.
A short window divided by the nominal K gives an update that is too small: 8 times with one
micro-batch of 8 left.

## Known problems
Counters that continue over epochs are not reported: their windows span epochs and only the very
last one is lost. They are reported if gradients are cleared at the start of every epoch. A loader
whose length is a multiple of K is recognised only if the file enforces it.

## Example
```python
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / accum).backward()
    if (i + 1) % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
```

## Use instead
```python
acc = wb.Accumulator(model, optimizer, steps=accum)
for x, y in acc.over(loader):               # knows the tail and divides by what was there
    acc.backward(criterion_sum(model(x), y), units=len(y))
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.window_boundary import Boundary
from .rule_base import Report, Rule, steps_every_micro_batch

__all__ = ["RULE"]


def check(file: File) -> Iterator[Report]:
    """Yield at most one report per window."""
    for window in file.accumulating:
        boundary = window.boundary
        if boundary is None or not _ends_short(window, boundary):
            continue
        handled = boundary.tail or _flushed(window)
        if handled and _nominal(window):
            yield Report(
                boundary.expr,
                f"the short last window is divided by the nominal `{window.every_name}`, not "
                "by the micro-batches that it has",
            )
        elif not handled and not _is_multiple(window):
            fate = "dropped" if _cleared_before(window) else "left over for the next window"
            yield Report(
                boundary.expr,
                f"micro-batches after the last multiple of `{window.every_name}` never reach an "
                f"update of their own: they are {fate} at the end of the loader",
            )


def _ends_short(window: LoopWindow, boundary: Boundary) -> bool:
    """True if only the count ends windows, and the loader can end before the count is full."""
    if window.shape != "boundary" or not boundary.pure or boundary.kind not in {"modulo", "reset"}:
        return False
    if not window.finite or steps_every_micro_batch(window):
        return False
    return not boundary.spanning or _cleared_before(window)


def _is_multiple(window: LoopWindow) -> bool:
    """True if the file itself makes the loader's length a multiple of the window."""
    name = re.escape(window.every_name.rpartition(".")[2])
    pattern = rf"len\([^)\n]*\)\s*%\s*[\w.]*{name}|//\s*[\w.]*{name}\s*\)?\s*\*\s*[\w.]*{name}"
    return bool(re.search(pattern, window.facts.source))


def _flushed(window: LoopWindow) -> bool:
    return any(e.kind == "step" and e.loops == window.loop.parents for e in window.after)


def _nominal(window: LoopWindow) -> bool:
    return any(
        d.key == window.every_name and not window.resolver.varies(d.expr, window.loop)
        for _, chain in window.chains
        for d in chain.divisors
    )


def _cleared_before(window: LoopWindow) -> bool:
    return bool(window.loop.parents) and any(e.kind == "zero" for e in window.before)


RULE = Rule(
    code="WB109",
    name="tail of the epoch",
    summary="The short last window is dropped, leaks, or is divided by the nominal count.",
    check=check,
)
