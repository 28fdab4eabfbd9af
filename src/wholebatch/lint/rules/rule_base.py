"""The rule, what it reports, and the questions about a window that several rules ask."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ..model import Event, File, LoopWindow
from ..model.expressions import FunctionNode, has_word, keyword, last_part, number, text
from ..model.file_facts import Facts, methods_called
from ..model.loop_windows import steps_after

# Code that multiplies or divides gradients themselves.
RESCALED = re.compile(
    r"\.grad(\.data)?\s*(/=|\*=|=\s*[\w.]+\.grad\s*[*/](?!\s*\w*mask))"
    r"|\.grad(\.data)?\.(div_|mul_)\((?![^\n]*loss_scale)|scale_grad\w*\(|_foreach_(mul|div)_|multiply_grads|rescale_grad"
)
_STEPS_DEEP = 3
_ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig"}


@dataclass(frozen=True, eq=False)
class Report:
    """The output of a rule: the node and the message."""

    node: ast.AST
    message: str


@dataclass(frozen=True)
class Rule:
    """One rule: a short name, its check, and its level. Its module has the code and the texts."""

    name: str
    check: Callable[[File], Iterator[Report]]
    level: str = "warning"

    @cached_property
    def code(self) -> str:
        """Return the code that the module is named after: `wb101_undivided_loss`."""
        return self.check.__module__.rpartition(".")[2][:5].upper()

    @property
    def explanation(self) -> str:
        """Return the docstring of the rule's module: what is wrong, why, and what to write."""
        return inspect.cleandoc(sys.modules[self.check.__module__].__doc__ or "")

    @property
    def summary(self) -> str:
        """Return the first sentence of the explanation."""
        return self.explanation.partition("\n")[0]

    @property
    def page(self) -> str:
        """Return the address of the rule's page in the documentation."""
        return f"docs/lint/{self.code}.md"


def rule(
    name: str, *, level: str = "warning"
) -> Callable[[Callable[[File], Iterator[Report]]], Rule]:
    """Make a check into the rule of its module."""
    return lambda check: Rule(name, check, level)


def closing_steps(window: LoopWindow) -> list[Event]:
    """Return the optimizer steps that close the window, at the boundary or after the inner loop."""
    if window.shape == "nested":
        return steps_after(window)
    wanted = {"always"} if window.shape in {"plain", "accelerate"} else {"boundary"}
    return [e for e in window.of("step") if window.when(e) in wanted | {"boundary"}]


def is_optimizer_of(zero: Event, steps: list[Event]) -> bool:
    """True if a `zero_grad` clears what these steps use: the same optimizer, or the whole model."""
    names = {s.receiver_text for s in steps}
    is_optimizer = "opt" in zero.receiver_text.lower()
    return zero.receiver_text in names - {""} or (len(names) == 1 and not is_optimizer)


def is_prepared(event: Event, facts: Facts) -> bool | None:
    """True if Accelerate wraps a schedule and so steps it once per update, None if unknown."""
    calls = facts.made("prepare", "prepare_scheduler")
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
        if any(base.endswith("Trainer") for base in owner.bases):
            first, framework = "compute_loss", "the Trainer"
            own = owner.methods.get("training_step")
            if own is not None and "compute_loss(" not in text(own):
                continue
        elif any("Module" in b for b in owner.bases) and not is_manual(owner.node):
            first, framework = "training_step", "Lightning"
        else:
            continue
        names = {first: None} if first in owner.methods else {}
        for _ in range(_STEPS_DEEP):
            called = [n for name in names for n in methods_called(owner.methods[name].body)]
            calls_itself = any("self(" in text(owner.methods[n]) for n in names)
            called += ["forward"] if calls_itself else []
            names |= dict.fromkeys(n for n in called if n in owner.methods)
        if names:
            yield [owner.methods[name] for name in names], framework


def is_manual(owner: ast.ClassDef) -> bool:
    """True if a LightningModule has a loop of its own: `automatic_optimization = False`."""
    return "automatic_optimization = False" in text(owner)


def framework_accumulates(file: File) -> bool:
    """True if a Lightning or transformers Trainer created here accumulates by itself."""
    if "args.accumulate_grad_batches" in file.facts.source:
        return True  # A setting that the caller of its Trainer gives.
    for call in file.facts.calls:
        given = keyword(call, "accumulate_grad_batches")
        if given is None and last_part(call.func) in _ARGUMENTS:
            given = keyword(call, "gradient_accumulation_steps")
        if given is not None and number(given) != 1 and text(given) != "None":
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
    for zero in window.of("zero"):
        mine = next((b for b in window.boundaries(zero) if window.is_ours(b)), None)
        is_early = window.when(zero) == "boundary" and zero.order < first
        # At the start of a window the same words have another count: `i % k == 0`.
        same = mine is not None and mine.shift == boundary.shift
        if is_early and same and is_optimizer_of(zero, steps):
            return zero
    return None
