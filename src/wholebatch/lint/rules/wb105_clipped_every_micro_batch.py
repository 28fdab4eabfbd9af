"""Gradients are clipped on every micro-batch.

## What it does
Finds gradient clipping that runs for every micro-batch of a window instead of once before the
update.

## Why is this bad?
Clipping a partial gradient is not clipping the gradient of the whole batch. Early micro-batches are
clipped again and again, late ones are not, and the final gradient has the direction of no batch. It
also costs a pass over all parameters for each micro-batch.

## Known problems
Calls that only measure the norm (`max_norm=float("inf")`) are not reported.

## Example
```python
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
if (step + 1) % accum == 0:
    optimizer.step()
```

## Use instead
```python
loss.backward()
if (step + 1) % accum == 0:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
```
Under Accelerate: `if accelerator.sync_gradients:` around the clipping.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Context
from ..model.expressions import text
from .rule_base import Edit, Report, Rule, stepped

__all__ = ["RULE"]


def check(file: File) -> Iterator[Report]:
    """Yield every clipping call that is not at the boundary."""
    for window in file.accumulating:
        if window.shape == "deepspeed":
            continue
        for clip in window.of("clip"):
            if window.when(clip) != "always":
                continue
            if window.shape == "accelerate" and not _in_accumulate(clip):
                continue
            yield Report(
                clip.node,
                "gradients are clipped on every micro-batch: clip once, at the end of the window, "
                "before the optimizer steps",
                _fix(window, clip),
            )


def _in_accumulate(clip: Event) -> bool:
    return any(isinstance(c, Context) and ".accumulate(" in text(c.expr) for c in clip.path)


def _fix(window: LoopWindow, clip: Event) -> tuple[Edit, ...]:
    steps = stepped(window)
    if window.shape != "boundary" or len(steps) != 1 or not isinstance(clip.stmt, ast.Expr):
        return ()
    if clip.path != (*window.loop.parents, window.loop) or clip.stmt.value is not clip.node:
        return ()
    if window.of("unscale") or steps[0].detail == "scaler" or len(window.of("clip")) != 1:
        return ()
    if clip.order > steps[0].order:
        return ()
    return (Edit.at("delete", clip.stmt), Edit.at("before", steps[0].stmt, text(clip.stmt)))


RULE = Rule(
    code="WB105",
    name="clipped every micro-batch",
    summary="Gradients are clipped for every micro-batch instead of once per update.",
    check=check,
    fixable=True,
)
