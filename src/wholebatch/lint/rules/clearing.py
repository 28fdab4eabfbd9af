"""When gradients are made and cleared: a backward for each micro-batch, one clearing per window."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..normalise import Event, Loop
from ..normalise.syntax import last_part, names_in, shown, text, values_of, written
from ..windows import File, Window
from ..windows.values import symbols_in
from ..windows.window import is_optimizer_of
from .rule_base import Report, rule


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
            if _clears_for(clear, steps, window) and _every_micro_batch(clear, window, steps):
                yield Report(
                    clear.node,
                    "gradients are cleared on every micro-batch, but used once per window of "
                    f"{window.count_name}: only the last micro-batch counts; clear once, "
                    "after the step",
                    window.level,
                )


def _clears_for(clear: Event, steps: list[Event], window: Window) -> bool:
    """True if these steps use what is cleared: no other model, such as a teacher's."""
    makers = [call for step in steps for call in window.file.reader.made_by(step.receiver)]
    names = {name.partition("@")[0] for name in names_in(*makers)}
    model = "" if clear.owner in {step.owner for step in steps} else last_part(clear.receiver)
    is_other = model != "" and "parameters" in names and model not in names
    return is_optimizer_of(clear, steps) and not is_other


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
        near = window.after if window.shape == "nested" else window.events
        clears = [e for e in near if e.kind == "clear"]
        for clear in clears:
            step = _step_after(clear, window)
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
    inside = window.shape == "accelerate" and clear.in_accumulate_of(window.loop)
    first = all(clear.order < backward.order for backward in window.of("backward"))
    is_own = is_optimizer_of(clear, window.of("step"))
    return inside and first and is_own and window.when(clear) == "always"


def _step_after(clear: Event, window: Window) -> Event | None:
    """Return the step that could use the gradients that are cleared just before it."""
    steps = [s for s in window.closing_steps() if not s.excludes(clear)]
    backwards = [b for b in window.backwards if b.order < clear.order and not b.excludes(clear)]
    # An earlier step of the same optimizer has used the gradients cleared here.
    if not _clears_for(clear, steps, window) or any(s.order < clear.order for s in steps):
        return None
    for step in steps:
        same = step.loops == clear.loops and window.when(clear) == window.when(step)
        # Not where the update is skipped, and not before another backward.
        later = [e for e in (*window.events, *window.after) if clear.order < e.order < step.order]
        again = any(e.kind == "backward" for e in later)
        useful = not all(b.excludes(step) for b in backwards)
        if same and clear.keys() <= step.keys() and useful and not again:
            return step
    return None


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


@rule("WB122", "gradients never cleared")
def never_cleared(file: File) -> Iterator[Report]:
    """Gradients are never cleared, so every update adds up all batches since the start.

    Call `optimizer.zero_grad()` after every step.
    """
    cleared: dict[int, set[Loop | None]] = {}
    for window in file.shaped("plain", "boundary", "nested"):
        steps = window.closing_steps()
        # What calls a step function may clear.
        if window.loop.virtual or window.is_by_hand or not steps or not steps[0].loops:
            continue
        loop, root = steps[0].loops[-1], steps[0].root
        if root not in cleared:
            clears = [e for e in file.normal.around(root) if e.kind == "clear"]
            cleared[root] = {loop for e in clears for loop in e.loops}
            cleared[root] |= {None for e in clears if e.root != root}
        # Once before all loops is not once per update.
        if cleared[root].isdisjoint({loop, None}) and all(
            _is_of_torch(step, loop, window) for step in steps
        ):
            yield Report(
                steps[0].node,
                "no gradient is cleared around this loop: every update adds up all batches since "
                "the start; call `zero_grad()` after the step",
            )
            return


def _is_of_torch(step: Event, loop: Loop, window: Window) -> bool:
    """True if a step is of torch's own optimizer: another, or what is handed one, may clear."""
    makers = window.file.reader.made_by(step.receiver)
    by_torch = any("optim." in text(call.func) for call in makers)
    # Made anew in every iteration: its gradients are compared.
    is_new = any(loop in s.loops for s in symbols_in(step.receiver, window.file))
    calls = [e.node for e in window.of("call") if isinstance(e.node, ast.Call)]
    handed = [text(value) for call in calls for value in values_of(call)]
    return by_torch and not is_new and step.owner not in handed
