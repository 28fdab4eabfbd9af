"""When gradients are made and cleared: a backward for each micro-batch, one clearing per window."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..normalise import Event, Loop, NormalFile
from ..normalise.syntax import names_in, shown, text, values_of, written
from ..windows import File, Window
from ..windows.values import symbols_in
from ..windows.window import is_optimizer_of
from .rule_base import ERROR, NOTE, Report, rule


@rule("WB104", "gradients cleared every micro-batch", "error or note")
def cleared_every_micro_batch(file: File) -> Iterator[Report]:
    """`zero_grad` runs for every micro-batch, so only the last one of a window counts.

    The gradients of the other micro-batches are computed and thrown away: the update is that of a
    batch K times smaller, at K times the cost. Clear once per window, after the step.
    """
    for window in file.shaped("boundary", "nested"):
        if window.is_by_hand:
            continue  # The gradients may be kept elsewhere.
        steps = window.closing_steps()
        for clear in window.of("clear"):
            if is_optimizer_of(clear, steps) and _every_micro_batch(clear, window, steps):
                yield Report(
                    clear.node,
                    "gradients are cleared on every micro-batch, but used once per window of "
                    f"{window.count_name}: only the last micro-batch counts; clear once, "
                    "after the step",
                    window.level,
                )


def _every_micro_batch(clear: Event, window: Window, steps: list[Event]) -> bool:
    """True if it runs on every micro-batch: unconditionally, or under conditions of its step."""
    if steps and all(clear.excludes(step) for step in steps):
        return False  # On another branch.
    if window.when(clear) != "sometimes":
        return window.when(clear) == "always"
    mine = clear.keys(window.loop)
    own = [s for s in steps if s.owner == clear.owner]
    return any(mine <= step.keys(window.loop) for step in own)


@rule("WB117", "cleared before the step")
def cleared_before_step(file: File) -> Iterator[Report]:
    """Gradients are cleared between the backward that made them and the step.

    The optimizer steps with no gradient, or with that of the last micro-batch alone. Clear after
    the step, or before the first backward of a window.
    """
    for window in file.windows:
        unknown = window.loop.virtual and window.shape == "plain"
        if unknown or window.shape == "last_only" or window.is_by_hand:
            continue
        steps = window.closing_steps()
        for clear in _clears(window):
            step = _step_after(clear, steps, window)
            if _clears_the_others(clear, window):
                yield Report(
                    clear.node,
                    "on the last micro-batch of a window Accelerate lets this through, and the "
                    "gradients of the others are lost; clear after the step",
                )
                break
            if step is not None:
                yield Report(
                    clear.node,
                    f"gradients are cleared before `{shown(written(step.node))}` uses them: clear "
                    "after it",
                )


def _clears_the_others(clear: Event, window: Window) -> bool:
    """True for a clearing inside `accumulate()` before the backward: only the last one counts."""
    if window.shape != "accelerate" or window.when(clear) != "always":
        return False
    inside = any("accumulate" in names_in(c) for c in clear.contexts(window.loop))
    first = all(clear.order < backward.order for backward in window.of("backward"))
    return inside and first and is_optimizer_of(clear, window.of("step"))


def _clears(window: Window) -> list[Event]:
    if window.shape == "nested":
        return [e for e in window.after if e.kind == "clear" and window.is_beside(e)]
    return window.of("clear")


def _step_after(clear: Event, steps: list[Event], window: Window) -> Event | None:
    """Return the step that could use the gradients that are cleared just before it."""
    later = [*window.of("backward"), *(e for e in window.after if e.kind == "backward")]
    # An earlier step of the same optimizer has used the gradients cleared here.
    used = any(s.order < clear.order and not s.excludes(clear) for s in steps)
    backwards = [b for b in window.backwards if b.order < clear.order and not b.excludes(clear)]
    for step in steps if is_optimizer_of(clear, steps) and not used else ():
        if _holds_others(clear, step, window) or step.order < clear.order or clear.excludes(step):
            continue
        if step.loops != clear.loops or window.when(clear) != window.when(step):
            continue
        # Not where the update is skipped, and not before another backward.
        again = any(clear.order < b.order < step.order for b in later)
        useful = not all(b.excludes(step) for b in backwards)
        if clear.keys() <= step.keys() and useful and not again:
            return step
    return None


def _holds_others(clear: Event, step: Event, window: Window) -> bool:
    """True if the optimizer holds the parameters of another model than the cleared one."""
    makers = " ".join(text(call) for call, _ in window.file.reader.made_by(step.receiver))
    return clear.owner != step.owner and "parameters(" in makers and f"{clear.owner}." not in makers


@rule("WB118", "backward only at the boundary", "error or note")
def backward_at_boundary(file: File) -> Iterator[Report]:
    """The backward runs only at the boundary, so all micro-batches but the last are lost.

    Their losses are computed and thrown away: the update is that of one micro-batch. Run the
    backward for every micro-batch, and only the step at the boundary.
    """
    for window in file.shaped("last_only"):
        if not any(_is_sum(event, window) for event in window.backwards):
            yield Report(
                window.backwards[0].node,
                f"the backward runs once every {window.count_name} micro-batches, and the losses "
                "of the others are lost: run it for every micro-batch, and the step at the "
                "boundary",
                window.level,
            )


def _is_sum(event: Event, window: Window) -> bool:
    """True if the loss of the backward may hold earlier micro-batches: `total = total + loss`."""
    terms = [term for of, term in window.terms if of is event]
    carried = [s for t in terms for s in symbols_in(t.base, window.file) if s.kind == "carried"]
    return any(t.call is None for t in terms) or any(s.loop is window.loop for s in carried)


@rule("WB122", "gradients never cleared", "error or note")
def never_cleared(file: File) -> Iterator[Report]:
    """Gradients are never cleared, so every update adds up all batches since the start.

    Call `optimizer.zero_grad()` after every step.
    """
    cleared: dict[int, set[Loop | None]] = {}
    for window in file.shaped("plain", "boundary", "nested"):
        # What calls a step function may clear.
        steps = [] if window.loop.virtual else window.closing_steps()
        if not steps or not steps[0].loops:
            continue
        root, loop = steps[0].root, steps[0].loops[-1]
        if root not in cleared:
            cleared[root] = _cleared_in(file.normal, root)
        # Once before all loops is not once per update.
        if cleared[root].isdisjoint({loop, None}) and _is_of_torch(window):
            yield Report(
                steps[0].node,
                "no gradient is cleared around this loop: every update adds up all batches since "
                "the start; call `zero_grad()` after the step",
                NOTE if window.is_by_hand else ERROR,
            )
            return


def _cleared_in(file: NormalFile, root: int) -> set[Loop | None]:
    """Return the loops of a function that clear gradients; None stands for another function."""
    clears = [e for e in file.around(root) if e.kind == "clear"]
    inside: set[Loop | None] = {loop for e in clears for loop in e.loops}
    return inside | {None for e in clears if e.root != root}


def _is_of_torch(window: Window) -> bool:
    """True if the optimizer is made here by torch, and only steps: a wrapper may clear itself."""
    reader = window.file.reader
    for step in window.closing_steps():
        made = reader.made_by(step.receiver)
        if not any("optim." in text(call.func) for call, _ in made):
            return False
        if any(window.loop in s.loops for s in symbols_in(step.receiver, window.file)):
            return False  # Made anew in every iteration: its gradients are compared.
        calls = [e for e in window.of("call") if isinstance(e.node, ast.Call)]
        if step.owner in [text(a) for e in calls for a in values_of(e.node)]:  # type: ignore[arg-type]
            return False
    return True
