"""The rule, what it reports, and what several rules ask about the frameworks."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..normalise import NormalFile
from ..normalise.file_index import methods_called
from ..normalise.syntax import FunctionNode, last_part, names_in, number, text
from ..windows import File

_STEPS_DEEP = 3
_TRAINERS = {"Trainer", "Seq2SeqTrainer"}
_TELLS_TRAINER = {"compute_loss_func", "model_accepts_loss_kwargs"}
_ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig"}

ERROR, NOTE = "error", "note"
"""Levels: wrong whatever the data are, or possible."""


@dataclass(frozen=True, eq=False)
class Report:
    """The output of a rule: the node, the message, and whether it is certain or a note."""

    node: ast.AST
    message: str
    level: str = ERROR


@dataclass(frozen=True)
class Rule:
    """One rule. The docstring of its check says what is wrong, why, and what to write."""

    code: str
    name: str
    level: str  # "error", "note", or "error or note"
    check: Callable[[File], Iterator[Report]]

    @property
    def explanation(self) -> str:
        """Return the docstring of the check."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """Return the first sentence of the explanation."""
        return self.explanation.partition("\n")[0]


def rule(
    code: str, name: str, level: str = ERROR
) -> Callable[[Callable[[File], Iterator[Report]]], Rule]:
    """Make a check into a rule."""
    return lambda check: Rule(code, name, level, check)


def framework_steps(file: NormalFile) -> Iterator[tuple[list[FunctionNode], str]]:
    """Yield the method that returns the loss to a framework, those that it calls, and the name."""
    for owner in file.index.classes.values():
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
            called += ["forward"] if any("self(" in ast.unparse(m) for m in methods) else []
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


def framework_accumulates(file: NormalFile) -> bool:
    """True if a Lightning or transformers Trainer created here accumulates by itself."""
    options = file.index.options
    steps = [value for _, value in options.get("accumulate_grad_batches", ())]
    for call, value in options.get("gradient_accumulation_steps", ()):
        steps += [value] if last_part(call.func) in _ARGUMENTS else []
    if any(number(value) != 1 and text(value) != "None" for value in steps):
        return True
    # A setting that the caller of its Trainer gives.
    return any(getattr(n, "attr", "") == "accumulate_grad_batches" for n in file.index.nodes)
