"""The rule, what it reports, and the questions about a window that several rules ask."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from ..model import Event, File, LoopWindow
from ..model.events import Env
from ..model.expressions import (
    FunctionNode,
    dotted,
    has_word,
    keyword,
    last_part,
    names_in,
    number,
    text,
)
from ..model.file_facts import methods_called
from ..model.loop_windows import steps_after

# Numbers of devices: a gradient divided by one is averaged over ranks, not over micro-batches.
_DEVICES = re.compile(r"world_?size|n_?gpu|num_gpus?|device_count|num_processes", re.I)
_STEPS_DEEP = 3
_TRAINERS = {"Trainer", "Seq2SeqTrainer"}
_TELLS_TRAINER = {"compute_loss_func", "model_accepts_loss_kwargs"}
_ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig"}

WRONG_UPDATE, SPEED, LOG = "wrong update", "speed", "log"
"""Levels: the update is not that of the batch, the run is slower, or only its log is wrong."""


@dataclass(frozen=True, eq=False)
class Report:
    """The output of a rule: the node and the message."""

    node: ast.AST
    message: str


@dataclass(frozen=True)
class Rule:
    """One rule. The docstring of its check says what is wrong, why, and what to write."""

    code: str
    name: str
    level: str
    check: Callable[[File], Iterator[Report]]

    @property
    def explanation(self) -> str:
        """Return the docstring of the check."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """Return the first sentence of the explanation."""
        return self.explanation.partition("\n")[0]

    @property
    def page(self) -> str:
        """Return the address of the rule's page in the documentation."""
        return f"docs/lint/{self.code}.md"


def rule(
    code: str, name: str, level: str = WRONG_UPDATE
) -> Callable[[Callable[[File], Iterator[Report]]], Rule]:
    """Make a check into a rule."""
    return lambda check: Rule(code, name, level, check)


def closing_steps(window: LoopWindow) -> list[Event]:
    """Return the optimizer steps that close the window, at the boundary or after the inner loop."""
    if window.shape == "nested":
        return steps_after(window)
    wanted = {"always"} if window.shape in {"plain", "accelerate"} else {"boundary"}
    return [e for e in window.of("step") if window.when(e) in wanted | {"boundary"}]


def is_optimizer_of(clear: Event, steps: list[Event]) -> bool:
    """True if a `zero_grad` clears what these steps use: the same optimizer, or the whole model."""
    names = {s.receiver_text for s in steps}
    is_optimizer = "opt" in clear.receiver_text.lower()
    return clear.receiver_text in names - {""} or (len(names) == 1 and not is_optimizer)


def rescales(window: LoopWindow) -> bool:
    """True if the window multiplies or divides the gradients themselves, other than over ranks."""
    behind = takewhile(lambda e: e.kind != "backward", window.after)
    events = [e for e in (*window.events, *behind) if e.kind == "rescale"]
    return any(not _DEVICES.search(_spelled(e.argument, e.env)) for e in events)


def _spelled(factor: ast.expr | None, env: Env) -> str:
    """Return a factor as text, with what its name stands for."""
    return " ".join(text(e) for e in (factor, *(d.expr for d in env.get(dotted(factor) or "", ()))))


def is_prepared(event: Event, window: LoopWindow) -> bool | None:
    """True if Accelerate wraps a schedule and so steps it once per update, None if unknown."""
    by_name = window.around.calls
    calls = [*by_name.get("prepare", ()), *by_name.get("prepare_scheduler", ())]
    if event.receiver is None or isinstance(event.receiver, ast.Subscript):
        return None
    name = text(event.receiver).rpartition(".")[2]
    if any(has_word(name, text(call).replace(".", " ")) for call in calls):
        return True
    starred = any(isinstance(a, ast.Starred) for call in calls for a in call.args)
    return None if starred or not any(len(call.args) > 1 for call in calls) else False


def framework_steps(file: File) -> Iterator[tuple[list[FunctionNode], str]]:
    """Yield the method that returns the loss to a framework, those that it calls, and the name."""
    for owner in file.facts.classes:
        if any(base.rpartition(".")[2] in _TRAINERS for base in owner.bases):
            first, framework = "compute_loss", "the Trainer"
            own = owner.methods.get("training_step")
            if own is not None and "compute_loss" not in names_in(own):
                continue
            if not _TELLS_TRAINER.isdisjoint(names_in(owner.node)):
                continue  # The class decides whether the Trainer divides.
        elif any("Module" in b for b in owner.bases) and not is_manual(owner.node):
            first, framework = "training_step", "Lightning"
        else:
            continue
        names = {first: None} if first in owner.methods else {}
        for _ in range(_STEPS_DEEP):
            methods = [owner.methods[name] for name in names]
            called = list(methods_called(methods))
            called += ["forward"] if any("self(" in text(m) for m in methods) else []
            names |= dict.fromkeys(n for n in called if n in owner.methods)
        if names:
            yield [owner.methods[name] for name in names], framework


def is_manual(owner: ast.ClassDef) -> bool:
    """True if a LightningModule has a loop of its own: `automatic_optimization = False`."""
    assigns = [n for n in ast.walk(owner) if isinstance(n, ast.Assign)]
    return any(
        last_part(a.targets[0]) == "automatic_optimization" and text(a.value) == "False"
        for a in assigns
    )


def framework_accumulates(file: File) -> bool:
    """True if a Lightning or transformers Trainer created here accumulates by itself."""
    for node in file.facts.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "accumulate_grad_batches":
            return True  # A setting that the caller of its Trainer gives.
        if not isinstance(node, ast.Call):
            continue
        steps = keyword(node, "accumulate_grad_batches")
        if steps is None and last_part(node.func) in _ARGUMENTS:
            steps = keyword(node, "gradient_accumulation_steps")
        if steps is not None and number(steps) != 1 and text(steps) != "None":
            return True
    return False


def cleared_last(window: LoopWindow) -> Event | None:
    """Return a clearing at the boundary just before the last backward of a window."""
    boundary, steps = window.boundary, closing_steps(window)
    first = min((b.order for b in window.backwards), default=0)
    if boundary is None or boundary.shift is None or not steps:
        return None
    if any(step.order < first for step in window.of("step")):
        return None
    for clear in window.of("clear"):
        mine = next((b for b in window.boundaries(clear) if window.is_ours(b)), None)
        is_early = window.when(clear) == "boundary" and clear.order < first
        # At the start of a window the same words have another count: `i % k == 0`.
        same = mine is not None and mine.shift == boundary.shift
        if is_early and same and is_optimizer_of(clear, steps):
            return clear
    return None
