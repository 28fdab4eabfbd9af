"""The rule, what it reports, and the questions about a window that several rules ask."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

from ..model import Event, File, LoopWindow, read_trained
from ..model.expressions import (
    FunctionNode,
    dotted,
    is_binary,
    is_call,
    keyword,
    last_part,
    number,
    text,
    walk,
)
from ..model.file_facts import ClassFacts, Facts, methods_called
from ..model.loop_windows import steps_after
from ..model.window_boundary import says_accumulating

# Code that multiplies or divides gradients themselves.
RESCALED = re.compile(
    r"\.grad(\.data)?\s*(/=|\*=|=\s*[\w.]+\.grad\s*[*/](?!\s*\w*mask))"
    r"|\.grad(\.data)?\.(div_|mul_)\((?![^\n]*loss_scale)|scale_grad\w*\(|_foreach_(mul|div)_|multiply_grads|rescale_grad"
)


_MANUAL = re.compile(r"automatic_optimization = False")
_CALLS_ITSELF = re.compile(r"\bself\(")
_HANDS_ON = re.compile(r"super\(\)\.training_step\(|self\.compute_loss\(")
_STEPS_DEEP = 3
# A setting that the file reads and the caller of its Trainer gives.
_SET_ELSEWHERE = re.compile(r"(hparams|args|config|cfg)\.accumulate_grad_batches")
_JAX_ADDS = re.compile(
    r"lambda (\w+), (\w+): \1 \+ \2( / (float\()?[\w.]*(ac+um|micro)[\w.)]*)?$|([\w.]+\.)?add$"
)


@dataclass(frozen=True)
class Edit:
    """One edit of a fix, at a node of the file.

    `action` is "delete" (the statement), "before" or "after" (insert a statement beside it), or
    "replace" (the expression). `kind` is the expression's class in libcst: nested expressions can
    start at the same place.
    """

    action: str
    line: int
    column: int
    code: str = ""
    kind: str = ""

    @staticmethod
    def at(action: str, node: ast.AST, code: str = "") -> Edit:
        """Return an edit at the place of a node; line 0 is in another module: it stays as it is."""
        line = 0 if hasattr(node, "foreign") else int(getattr(node, "lineno", 1))
        column = int(getattr(node, "col_offset", 0))
        return Edit(action, line, column, code, _KINDS.get(type(node), ""))


_KINDS: dict[type[ast.AST], str] = {ast.Name: "Name", ast.BinOp: "BinaryOperation"}


@dataclass(frozen=True, eq=False)
class Report:
    """The output of a rule: the node, the message, and a fix if there is one."""

    node: ast.AST
    message: str
    fix: tuple[Edit, ...] = ()
    unsafe: bool = False  # The fix rests on something that the file does not show.


@dataclass(frozen=True)
class Rule:
    """One rule: a short name, its check, and its level; its module has the code and a summary."""

    name: str
    check: Callable[[File], Iterator[Report]]
    level: str = "warning"
    fixable: bool = False

    @cached_property
    def code(self) -> str:
        """Return the code that the module is named after: `wb101_undivided_loss`."""
        return self.check.__module__.rpartition(".")[2][:5].upper()

    @property
    def summary(self) -> str:
        """Return one sentence: the module's docstring."""
        return sys.modules[self.check.__module__].__doc__ or ""

    @property
    def page(self) -> str:
        """Return the rule's page in Markdown.

        The file beside the rule's module says what the rule does, why it matters, its known
        problems, an example, and what to use instead.
        """
        file = files(__package__) / f"{self.check.__module__.rpartition('.')[2]}.md"
        fix = "`--fix` repairs the certain cases." if self.fixable else "No automatic fix."
        head = f"# {self.code}: {self.name}\n\n*{self.level} · {fix}*\n\n{self.summary}"
        return f"{head}\n\n{file.read_text(encoding='utf-8')}"


def rule(
    name: str, *, level: str = "warning", fixable: bool = False
) -> Callable[[Callable[[File], Iterator[Report]]], Rule]:
    """Make a check into the rule of its module."""
    return lambda check: Rule(name, check, level, fixable)


_ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig"}


def stepped(window: LoopWindow) -> list[Event]:
    """Return the optimizer steps that close the window, at the boundary or after the inner loop."""
    if window.shape == "nested":
        return steps_after(window)
    wanted = {"always"} if window.shape in {"plain", "accelerate"} else {"boundary"}
    return [e for e in window.of("step") if window.when(e) in wanted | {"boundary"}]


def steps_every_micro_batch(window: LoopWindow) -> bool:
    """True if only the clearing waits for the boundary: every micro-batch is an update."""
    steps = window.of("step")
    return (
        window.shape == "boundary"
        and bool(steps)
        and all(window.when(s) == "always" for s in steps)
    )


def is_optimizer_of(zero: Event, steps: list[Event]) -> bool:
    """True if a `zero_grad` clears what these steps use: the same optimizer, or the whole model."""
    names = {s.receiver_text for s in steps}
    is_optimizer = bool(re.search(r"opt", zero.receiver_text, re.I))
    return zero.receiver_text in names - {""} or (len(names) == 1 and not is_optimizer)


def is_divided(window: LoopWindow) -> bool:
    """True if every loss is divided by the number of micro-batches, or where that is above 1."""
    for event in window.backwards:
        ways = [{d.node for d in c.divisors if window.counts(d)} for c in window.ways(event)]
        lines = {getattr(node, "lineno", 0) for way in ways for node in way}
        divisions = [e for e in window.of("assign", "augment") if e.line in lines]
        guards = [g.expr for e in divisions for g in e.guards(window.loop)]
        if not all(ways) and not any(says_accumulating(g, window.every_key) for g in guards):
            return False
    return bool(window.backwards)


def is_right(window: LoopWindow, event: Event | None = None) -> bool:
    """True if nothing but the event is wrong in the window: mending it mends the update."""
    events = window.of("zero", "clip", "scaler_update", "sched")
    return (
        window.alone
        and is_divided(window)
        and not any(window.when(e) == "always" for e in events if e is not event)
    )


def moved(
    event: Event, window: LoopWindow, where: str, beside: Event | None = None
) -> tuple[Edit, ...]:
    """Return the edits that move a statement of every micro-batch to the one step, or ()."""
    steps = stepped(window)
    plain = event.path == (*window.loop.parents, window.loop)
    is_statement = isinstance(event.stmt, ast.Expr) and event.stmt.value is event.node
    if window.shape != "boundary" or len(steps) != 1 or not plain or not is_statement:
        return ()
    target = steps[0] if beside is None else beside
    return (Edit.at("delete", event.stmt), Edit.at(where, target.stmt, text(event.stmt)))


def prepared(event: Event, facts: Facts) -> bool | None:
    """True if Accelerate wraps a schedule and so steps it once per update, None if unknown."""
    calls = facts.made("prepare", "prepare_scheduler")
    if event.receiver is None or isinstance(event.receiver, ast.Subscript):
        return None
    name = text(event.receiver).rpartition(".")[2]
    if any(re.search(rf"\b{re.escape(name)}\b", text(call)) for call in calls):
        return True
    starred = any(isinstance(a, ast.Starred) for call in calls for a in call.args)
    return None if starred or not any(len(call.args) > 1 for call in calls) else False


def framework_steps(file: File) -> Iterator[tuple[list[FunctionNode], str]]:
    """Yield the method that returns the loss to a framework, those that it calls, and the name."""
    for owner in file.facts.classes:
        if file.trained not in {"", owner.node.name}:
            continue
        if any(base.endswith("Trainer") for base in owner.bases):
            first, framework = "compute_loss", "the Trainer"
            own = owner.methods.get("training_step")
            if own is not None and not _HANDS_ON.search(text(own)):
                continue
        elif any("Module" in b for b in owner.bases) and not _MANUAL.search(text(owner.node)):
            first, framework = "training_step", "Lightning"
        else:
            continue
        names = {first: None} if first in owner.methods else {}
        for _ in range(_STEPS_DEEP):
            called = [n for name in names for n in methods_called(owner.methods[name].body)]
            forward = (
                ["forward"]
                if any(_CALLS_ITSELF.search(text(owner.methods[n])) for n in names)
                else []
            )
            names |= dict.fromkeys(n for n in (*called, *forward) if n in owner.methods)
        if names:
            methods = [owner.methods[name] for name in names]
            yield [*methods, *_of_parts(methods, owner, file)], framework


def _of_parts(methods: list[FunctionNode], owner: ClassFacts, file: File) -> Iterator[FunctionNode]:
    """Yield the methods of other classes of the file that `self.part.method()` calls."""
    made = {
        name: last_part(v.func) for name, v in owner.attributes.items() if isinstance(v, ast.Call)
    }
    classes = {c.node.name: c for c in file.facts.classes}
    for call in (node for method in methods for node in walk(method)):
        if not isinstance(call, ast.Call):
            continue
        held, _, name = (dotted(call.func) or "").rpartition(".")
        part = classes.get(made.get(held, "")) or classes.get(made.get(f"{held}.{name}", ""))
        if part is not None and part is not owner:
            found = part.methods.get(name) or part.methods.get("forward")
            yield from [found] if found is not None else []


def jax_sums(file: File) -> list[ast.Call]:
    """Return the calls that add up gradients with JAX: `tree_map(jnp.add, total, grads)`."""
    calls = file.facts.made("tree_map", "map") if "jax" in file.facts.source else []
    adds = [c for c in calls if c.args and _JAX_ADDS.match(text(c.args[0]))]
    return [c for c in adds if "tree" in text(c.func)]


def cleared_last(window: LoopWindow) -> Event | None:
    """Return a clearing at the boundary just before the last backward of a window."""
    boundary, steps = window.boundary, stepped(window)
    first = min((b.order for b in window.backwards), default=0)
    if boundary is None or not steps or any(step.order < first for step in window.of("step")):
        return None
    for zero in window.of("zero"):
        mine = next((b for b in window.boundaries(zero) if window.is_ours(b)), None)
        is_early = window.when(zero) == "boundary" and zero.order < first and mine is not None
        # At the start of a window the same words have another count: `i % k == 0`.
        if is_early and mine.shift == boundary.shift and is_optimizer_of(zero, steps):  # type: ignore[union-attr]
            return zero
    return None


def framework_accumulates(file: File) -> bool:
    """True if a Lightning or transformers Trainer created here accumulates by itself."""
    if "from_argparse_args" in file.facts.called and "accumulate_grad_b" in file.facts.source:
        return True
    if file.trained or file.facts.mentions(_SET_ELSEWHERE):
        return True
    for call in file.facts.calls:
        given = keyword(call, "accumulate_grad_batches")
        if given is None and last_part(call.func) in _ARGUMENTS:
            given = keyword(call, "gradient_accumulation_steps")
        if given is not None and number(given) != 1 and text(given) != "None":
            return True
    return False


def trained_elsewhere(file: File) -> list[tuple[File, ast.AST | None]]:
    """Return the modules of the classes that a Trainer of the file trains, and where it is told."""
    facts = file.facts
    if not facts.import_nodes or not framework_accumulates(file):
        return []
    held = [v for values in facts.assigned.values() for v in values if isinstance(v, ast.Dict)]
    chosen = [n for one in held for n in one.values]
    named = {dotted(n) or "": n for n in (*(c.func for c in facts.calls), *chosen)}
    found = [(read_trained(file, name), node) for name, node in named.items()]
    return [(module, node) for module, node in found if module is not None]


def replaces_one(window: LoopWindow) -> bool:
    """True for `torch.cat(cached[:j] + [new] + cached[j + 1:])` with the loop's own `j`."""
    index = dotted(window.loop.target) if window.loop.target is not None else None
    for node in walk(window.loop.node):
        if is_call(node, "cat", "concat", "concatenate") and node.args and index:
            joined = node.args[0]
            slices = [
                n
                for n in walk(joined)
                if isinstance(n, ast.Slice) and re.search(rf"\b{index}\b", text(n))
            ]
            if is_binary(joined, ast.Add) and len(slices) > 1:
                return True
    return False
