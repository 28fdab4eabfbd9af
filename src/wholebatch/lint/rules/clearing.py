"""When gradients are made and cleared: a backward for each micro-batch, one clearing per window."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, Guard, LoopWindow
from ..model.expressions import text, values_of
from ..model.surroundings import Surroundings
from .rule_base import Report, cleared_last, closing_steps, is_optimizer_of, rule


@rule("WB104", "gradients cleared every micro-batch")
def cleared_every_micro_batch(file: File) -> Iterator[Report]:
    """`zero_grad` runs for every micro-batch, so only the last one of a window counts.

    The gradients of the other micro-batches are computed and thrown away: the update is that of a
    batch K times smaller, at K times the cost. Clear once per window, after the step.
    """
    for window in file.shaped("boundary", "nested"):
        steps = closing_steps(window)
        for clear in window.of("clear"):
            if is_optimizer_of(clear, steps) and _every_micro_batch(clear, window, steps):
                yield Report(
                    clear.node,
                    "gradients are cleared on every micro-batch, but used once per window of "
                    f"{window.count_name}: only the last micro-batch counts; clear once, "
                    "after the step",
                )


def _every_micro_batch(clear: Event, window: LoopWindow, steps: list[Event]) -> bool:
    """True if it runs on every micro-batch: unconditionally, or under conditions of its step."""
    if steps and all(clear.excludes(step) for step in steps):
        return False  # On another branch.
    if window.when(clear) != "sometimes":
        return window.when(clear) == "always"
    mine = clear.conditions(window.loop)
    own = [s for s in steps if s.receiver_text == clear.receiver_text]
    return any(mine <= step.conditions(window.loop) for step in own)


@rule("WB117", "cleared before the step")
def cleared_before_step(file: File) -> Iterator[Report]:
    """Gradients are cleared between the backward that made them and the step.

    The optimizer steps with no gradient, or with that of the last micro-batch alone. Clear after
    the step, or before the first backward of a window.
    """
    for window in file.windows:
        unknown = window.loop.virtual and window.shape == "plain"
        if unknown or window.shape in {"deepspeed", "last_only"}:
            continue
        steps = closing_steps(window)
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
                    f"gradients are cleared before `{text(step.node)}` uses them: clear after it",
                )
            elif clear is cleared_last(window) and not window.boundary.after_first:  # type: ignore[union-attr]
                yield Report(
                    clear.node,
                    "gradients are cleared just before the last backward of the window: only that "
                    "micro-batch counts; clear after the step",
                )


def _clears_the_others(clear: Event, window: LoopWindow) -> bool:
    """True for a clearing inside `accumulate()` before the backward: only the last one counts."""
    if window.shape != "accelerate" or window.when(clear) != "always":
        return False
    inside = any("accumulate" in c.names for c in clear.contexts(window.loop))
    first = all(clear.order < backward.order for backward in window.of("backward"))
    return inside and first and is_optimizer_of(clear, window.of("step"))


def _clears(window: LoopWindow) -> list[Event]:
    if window.shape == "nested":
        return [e for e in window.after if e.kind == "clear" and e.loops == window.loop.parents]
    return window.of("clear")


def _step_after(clear: Event, steps: list[Event], window: LoopWindow) -> Event | None:
    """Return the step that could use the gradients that are cleared just before it."""
    later = [*window.of("backward"), *(e for e in window.after if e.kind == "backward")]
    # An earlier step of the same optimizer has used the gradients cleared here.
    used = any(s.order < clear.order and not s.excludes(clear) for s in steps)
    backwards = [b for b in window.backwards if b.order < clear.order and not b.excludes(clear)]
    for step in steps if is_optimizer_of(clear, steps) and not used else ():
        if _holds_others(clear, step) or step.order < clear.order or clear.excludes(step):
            continue
        if step.loops != clear.loops or window.when(clear) != window.when(step):
            continue
        # Not where the update is skipped, and not before another backward.
        again = any(clear.order < b.order < step.order for b in later)
        useful = not all(b.excludes(step) for b in backwards)
        if _conditions(clear) <= _conditions(step) and useful and not again:
            return step
    return None


def _conditions(event: Event) -> set[tuple[str, bool]]:
    return {g.key for g in event.path if isinstance(g, Guard)}


def _holds_others(clear: Event, step: Event) -> bool:
    """True if the optimizer holds the parameters of another model than the cleared one."""
    makers = " ".join(text(d.expr) for d in step.env.get(step.receiver_text, ()))
    owner = f"{clear.receiver_text}."
    return (
        clear.receiver_text != step.receiver_text
        and "parameters(" in makers
        and owner not in makers
    )


@rule("WB118", "backward only at the boundary")
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
            )


def _is_sum(event: Event, window: LoopWindow) -> bool:
    """True if the loss of the backward is a sum over micro-batches: `total = total + loss`."""
    names = {text(n) for n in ast.walk(event.argument or ast.Pass()) if isinstance(n, ast.Name)}
    sums = [e for e in window.of("augment") if window.when(e) != "boundary"]
    carried = [c for c in window.ways(event) if c.base_call is None]
    return bool(carried) or any(text(e.receiver) in names for e in sums)


@rule("WB122", "gradients never cleared")
def never_cleared(file: File) -> Iterator[Report]:
    """Gradients are never cleared, so every update adds up all batches since the start.

    Call `optimizer.zero_grad()` after every step.
    """
    for window in file.shaped("plain", "boundary", "nested"):
        # What calls a step function may clear.
        steps = [] if window.loop.virtual else closing_steps(window)
        if steps and not window.around.ask(_is_cleared) and _is_of_torch(window):
            yield Report(
                steps[0].node,
                "no gradient is cleared around this loop: every update adds up all batches since "
                "the start; call `zero_grad()` after the step",
            )
            return


def _is_cleared(around: Surroundings) -> bool:
    """True if the code around a loop clears or replaces gradients."""
    if not {"zero_grad", "zero_"}.isdisjoint(around.calls):
        return True
    assigns = [n for n in around.nodes if isinstance(n, ast.Assign)]
    return any(text(target).endswith(".grad") for a in assigns for target in a.targets)


def _is_of_torch(window: LoopWindow) -> bool:
    """True if the optimizer is made here by torch, and only steps: a wrapper may clear itself."""
    for step in closing_steps(window):
        makers = [text(call.func) for call, _ in window.makers(step.receiver_text, step.env)]
        if any(window.loop in d.loops for d in step.env.get(step.receiver_text, ())):
            return (
                False  # Made anew in every iteration: its gradients are compared, not trained on.
            )
        handed = [text(a) for e in window.of("call") for a in values_of(e.node)]  # type: ignore[arg-type]
        if step.receiver_text in handed or not any("optim." in name for name in makers):
            return False
    return True
