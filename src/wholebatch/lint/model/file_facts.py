"""Facts about the whole file: its functions and classes, its wrappers, and the names it sets."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .events import Definition, Env
from .expressions import FunctionNode, assigned_names, dotted, keyword, last_part, number, text

# Calls that make a function a part of training: it is walked, or followed from its caller.
_TRAINING_CALLS = {
    "backward", "training_step", "manual_backward", "loss_scaler", "zero_grad", "unscale_",
    "clip_grad_norm_", "clip_grad_value_", "optimizer_step",
}  # fmt: skip


@dataclass
class ClassFacts:
    """A class of the file: its methods, the attributes it sets once on self, and its bases."""

    node: ast.ClassDef
    methods: dict[str, FunctionNode]
    bases: tuple[str, ...]
    attributes: dict[str, ast.expr]
    # The attributes of self that each method sets, also through the methods that it calls.
    changed: dict[str, frozenset[str]]


@dataclass
class Facts:
    """Facts about one file that no single loop shows."""

    nodes: list[ast.AST]  # Every node of the tree, in the order of ast.walk.
    source: str
    functions: dict[str, FunctionNode]
    classes: list[ClassFacts]
    calls: list[ast.Call]
    called: set[str]
    imports: set[str]
    relevant: set[FunctionNode]
    every_function: list[FunctionNode]
    # Every value that is assigned to a name anywhere in the file.
    assigned: dict[str, list[ast.expr]]
    uses: dict[FunctionNode, set[str]]
    _searched: dict[re.Pattern[str], bool] = field(default_factory=dict)
    _assignments: dict[FunctionNode, Env] = field(default_factory=dict)

    def mentions(self, pattern: re.Pattern[str]) -> bool:
        """True if the source matches a pattern; each pattern is searched for once."""
        if pattern not in self._searched:
            self._searched[pattern] = pattern.search(self.source) is not None
        return self._searched[pattern]

    def class_of(self, name: str) -> str:
        """Return the source of the class of this file that a name is an instance of, or ""."""
        made = [last_part(v.func) for v in self.assigned.get(name, ()) if isinstance(v, ast.Call)]
        return "\n".join(text(c.node) for c in self.classes if c.node.name in made)

    def made(self, *names: str) -> list[ast.Call]:
        """Return the calls whose last name is one of these: `DDP(...)`, `nn.BatchNorm2d(...)`."""
        return [c for c in self.calls if last_part(c.func) in names]

    @cached_property
    def has_ignored_label(self) -> bool:
        """True if -100 is used other than as `ignore_index=` or in a comparison."""
        asked: set[int] = set()
        for node in self.nodes if "-100" in self.source else ():
            if isinstance(node, ast.keyword) and node.arg == "ignore_index":
                asked.add(id(node.value))
            elif isinstance(node, ast.Compare):
                asked.update(map(id, node.comparators))
            elif isinstance(node, ast.UnaryOp) and id(node) not in asked and number(node) == -100:
                return True
        return False

    @cached_property
    def accelerator(self) -> ast.Call | None:
        """Return the call that creates the Accelerator, if it is in this file."""
        found = self.made("Accelerator")
        # Several branches may create one: take that which is given the number of steps.
        told = [c for c in found if keyword(c, "gradient_accumulation_steps") is not None]
        return next(iter((*told, *found)), None)

    @property
    def accelerator_divides(self) -> bool | None:
        """True if Accelerate divides the loss, False if not, None if this file does not show it."""
        call = self.accelerator
        if call is None:
            return None
        given = keyword(call, "gradient_accumulation_steps")
        if given is not None:
            return number(given) != 1
        if keyword(call, "gradient_accumulation_plugin") is not None:
            return True
        unknown = keyword(call, "deepspeed_plugin") is not None
        return None if unknown or any(k.arg is None for k in call.keywords) else False

    def env_around(self, node: ast.AST) -> Env:
        """Return the assignments of the function that a node is in."""
        around = self.functions_around(getattr(node, "lineno", 0))
        if around and around[-1] not in self._assignments:
            self._assignments[around[-1]] = flat_env(ast.walk(around[-1]))
        return self._assignments[around[-1]] if around else Env()

    def functions_around(self, line: int) -> list[FunctionNode]:
        """Return the functions that contain a line."""
        last = bisect_right(self.every_function, line, key=lambda f: f.lineno)
        near = self.every_function[max(0, last - 50) : last]
        return [f for f in near if line <= (f.end_lineno or f.lineno)]


def gather(tree: ast.Module, source: str) -> Facts:
    """Collect everything from the file that is not about one loop."""
    calls: list[ast.Call] = []
    imports: set[str] = set()
    owners: list[ast.ClassDef] = []
    uses: dict[FunctionNode, set[str]] = {}
    assigned: dict[str, list[ast.expr]] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Call):
            calls.append(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            uses[node] = set()
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                assigned.setdefault(dotted(target) or "", []).append(node.value)
        elif isinstance(node, ast.ImportFrom):
            imports.add(node.module or "")
            imports.update(f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Import):
            imports.update(a.name for a in node.names)
        elif isinstance(node, ast.ClassDef):
            owners.append(node)
    calls.sort(key=lambda c: (c.lineno, c.col_offset))
    _fill_uses(uses, calls)
    classes = [_class(o) for o in sorted(owners, key=lambda o: o.lineno)]
    _inherit(classes)
    return Facts(
        nodes=nodes,
        source=source,
        functions=_functions(tree.body),
        classes=classes,
        calls=calls,
        called={last_part(c.func) for c in calls},
        imports=imports,
        relevant=_relevant(uses),
        every_function=sorted(uses, key=lambda f: f.lineno),
        assigned=assigned,
        uses=uses,
    )


def flat_env(nodes: Iterable[ast.AST]) -> Env:
    """Return the last assignment of each name among the nodes: enough to follow a name."""
    env = Env()
    assigns = [node for node in nodes if isinstance(node, ast.Assign)]
    for node in sorted(assigns, key=lambda a: a.lineno):
        env.bind(dotted(node.targets[0]) or "", (Definition(node.value, env, ()),))
    return env


def _fill_uses(uses: dict[FunctionNode, set[str]], calls: list[ast.Call]) -> None:
    """Add each call, by its line, to the calls of every function around it."""
    lines = [c.lineno for c in calls]
    for function, names in uses.items():
        first = bisect_left(lines, function.lineno)
        last = bisect_right(lines, function.end_lineno or function.lineno)
        names.update(last_part(c.func) for c in calls[first:last])


def _relevant(uses: dict[FunctionNode, set[str]]) -> set[FunctionNode]:
    """Return the functions that contain a training call, directly or in their helpers."""
    names = set(_TRAINING_CALLS)
    found: set[FunctionNode] = set()
    while True:
        new = {f for f, used in uses.items() if f not in found and used & names}
        if not new:
            return found
        found |= new
        names |= {f.name for f in new}


def _functions(body: list[ast.stmt]) -> dict[str, FunctionNode]:
    return {n.name: n for n in body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}


def _class(node: ast.ClassDef) -> ClassFacts:
    methods = _functions(node.body)
    bases = tuple(dotted(b) or "" for b in node.bases)
    return ClassFacts(node, methods, bases, _attributes(methods), _changes(methods))


def _changes(methods: dict[str, FunctionNode]) -> dict[str, frozenset[str]]:
    sets = {
        name: {n for n in assigned_names(method.body) if n.startswith("self.")}
        for name, method in methods.items()
    }
    calls = {
        name: set(methods_called(method.body)) & set(methods) for name, method in methods.items()
    }
    grown = True
    while grown:
        before = sum(map(len, sets.values()))
        for name, called in calls.items():
            sets[name].update(*(sets[c] for c in called))
        grown = sum(map(len, sets.values())) > before
    return {name: frozenset(found) for name, found in sets.items()}


def methods_called(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the `name` of every `self.name` in the statements: called, or handed on."""
    for stmt in body:
        for node in ast.walk(stmt):
            if isinstance(node, ast.Attribute) and dotted(node.value) == "self":
                yield node.attr


def _inherit(classes: list[ClassFacts]) -> None:
    """Give classes what they inherit from classes of the file."""
    by_name = {c.node.name: c for c in classes}
    for owner in classes:
        for base in (by_name[b] for b in owner.bases if b in by_name and b != owner.node.name):
            for name in base.methods:
                owner.methods.setdefault(name, base.methods[name])
            owner.attributes = base.attributes | owner.attributes
            owner.changed = base.changed | owner.changed


def _attributes(methods: dict[str, FunctionNode]) -> dict[str, ast.expr]:
    """Return the values of the attributes that are set once on self, or to a literal at first."""
    seen: dict[str, list[ast.expr]] = {}
    for method in methods.values():
        for name, stmt in _set_on_self(method):
            if len(stmt.targets) == 1 and name.count(".") == 1:
                seen.setdefault(name, []).append(stmt.value)
    attributes = {name: values[0] for name, values in seen.items() if len(values) == 1}
    # A counter that starts in __init__ and changes elsewhere still has a known start.
    if "__init__" in methods:
        for name, stmt in _set_on_self(methods["__init__"]):
            if isinstance(stmt.value, ast.Constant):
                attributes[name] = stmt.value
    return attributes


def _set_on_self(method: FunctionNode) -> Iterator[tuple[str, ast.Assign]]:
    for stmt in ast.walk(method):
        if isinstance(stmt, ast.Assign):
            name = dotted(stmt.targets[0]) or ""
            if name.startswith("self."):
                yield name, stmt


def class_env(facts: ClassFacts, env: Env) -> Env:
    """Return the environment of a method: the module's names and the class's attributes on self."""
    inner = Env(env)
    for name, value in facts.attributes.items():
        inner.bind(name, (Definition(value, env, ()),))
    return inner
