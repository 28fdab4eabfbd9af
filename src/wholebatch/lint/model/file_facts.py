"""Facts about the whole file: its functions and classes, its imports, and the names it sets."""

from __future__ import annotations

import ast
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .events import Definition, Env
from .expressions import FunctionNode, assigned_names, dotted, last_part, text

# Calls that make a function a part of training: it is walked, or followed from its caller.
_TRAINING_CALLS = {
    "backward", "training_step", "manual_backward", "loss_scaler", "zero_grad", "unscale_",
    "clip_grad_norm_", "clip_grad_value_", "optimizer_step",
}  # fmt: skip
# What these names mean in a file that does not import them otherwise.
_USUAL = {"F": "torch.nn.functional", "nn": "torch.nn", "optim": "torch.optim"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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

    tree: ast.Module
    nodes: list[ast.AST]  # Every node of the tree, in the order of ast.walk.
    functions: dict[str, FunctionNode]
    classes: list[ClassFacts]
    calls: list[ast.Call]
    called: set[str]
    imports: dict[str, str]  # What each imported name stands for.
    relevant: set[FunctionNode]
    every_function: list[FunctionNode]
    # Every value that is assigned to a name anywhere in the file.
    assigned: dict[str, list[ast.expr]]
    _assignments: dict[FunctionNode, Env] = field(default_factory=dict)
    _reached: dict[int, list[ast.AST]] = field(default_factory=dict)

    def full_name(self, expr: ast.AST) -> str:
        """Return a dotted name as it is imported: `torch.nn.Linear` for `nn.Linear`."""
        head, dot, rest = (dotted(expr) or last_part(expr)).partition(".")
        return self.imports.get(head, _USUAL.get(head, head)) + dot + rest

    def reached(self, start: ast.AST) -> list[ast.AST]:
        """Return a node, and the functions and classes that it names, directly or through them."""
        if id(start) not in self._reached:
            reached = {id(start): start}
            todo: list[ast.AST] = [start]
            while todo:
                node = todo.pop()
                named = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                called = set(methods_called([node]))
                more: list[ast.AST] = [f for n, f in self.functions.items() if n in named]
                for owner in self.classes:
                    more += [owner.node] if owner.node.name in named else []
                    more += [m for n, m in owner.methods.items() if n in called]
                new = [n for n in more if id(n) not in reached]
                reached.update((id(n), n) for n in new)
                todo += new
            self._reached[id(start)] = list(reached.values())
        return self._reached[id(start)]

    @cached_property
    def module(self) -> ast.Module:
        """Return what the module itself runs: its statements without functions and classes."""
        inner = (*_FUNCTIONS, ast.ClassDef)
        return ast.Module([s for s in self.tree.body if not isinstance(s, inner)], [])

    def class_of(self, name: str) -> str:
        """Return the source of the class of this file that a name is an instance of, or ""."""
        makers = [last_part(v.func) for v in self.assigned.get(name, ()) if isinstance(v, ast.Call)]
        return "\n".join(text(c.node) for c in self.classes if c.node.name in makers)

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

    def class_around(self, line: int) -> ast.ClassDef | None:
        """Return the innermost class that contains a line."""
        around = [c.node for c in self.classes if c.node.lineno <= line <= (c.node.end_lineno or 0)]
        return around[-1] if around else None


def gather(tree: ast.Module) -> Facts:
    """Collect everything from the file that is not about one loop."""
    calls: list[ast.Call] = []
    imports: dict[str, str] = {}
    owners: list[ast.ClassDef] = []
    functions: list[FunctionNode] = []
    assigned: dict[str, list[ast.expr]] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Call):
            calls.append(node)
        elif isinstance(node, _FUNCTIONS):
            functions.append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                assigned.setdefault(dotted(target) or "", []).append(node.value)
        elif isinstance(node, ast.ImportFrom):
            imports.update(
                (a.asname or a.name, f"{node.module or ''}.{a.name}") for a in node.names
            )
        elif isinstance(node, ast.Import):
            named = [(a.asname or a.name.partition(".")[0], a) for a in node.names]
            imports.update((n, a.name if a.asname else n) for n, a in named)
        elif isinstance(node, ast.ClassDef):
            owners.append(node)
    calls.sort(key=lambda c: (c.lineno, c.col_offset))
    functions.sort(key=lambda f: f.lineno)
    classes = [_class(o) for o in sorted(owners, key=lambda o: o.lineno)]
    _inherit(classes)
    return Facts(
        tree=tree,
        nodes=nodes,
        functions=_functions(tree.body),
        classes=classes,
        calls=calls,
        called={last_part(c.func) for c in calls},
        imports=imports,
        relevant=_relevant(functions, calls),
        every_function=functions,
        assigned=assigned,
    )


def flat_env(nodes: Iterable[ast.AST]) -> Env:
    """Return the last assignment of each name among the nodes: enough to follow a name."""
    env = Env()
    assigns = [node for node in nodes if isinstance(node, ast.Assign)]
    for node in sorted(assigns, key=lambda a: a.lineno):
        name = dotted(node.targets[0])
        if name is not None:
            env.bind(name, (Definition(node.value, env, ()),))
    return env


def _relevant(functions: list[FunctionNode], calls: list[ast.Call]) -> set[FunctionNode]:
    """Return the functions that contain a training call, directly or in their helpers."""
    lines = [c.lineno for c in calls]
    uses: dict[FunctionNode, set[str]] = {}
    for function in functions:
        first = bisect_left(lines, function.lineno)
        last = bisect_right(lines, function.end_lineno or function.lineno)
        uses[function] = {last_part(c.func) for c in calls[first:last]}
    names = set(_TRAINING_CALLS)
    relevant: set[FunctionNode] = set()
    while True:
        new = {f for f, used in uses.items() if f not in relevant and used & names}
        if not new:
            return relevant
        relevant |= new
        names |= {f.name for f in new}


def _functions(body: list[ast.stmt]) -> dict[str, FunctionNode]:
    return {n.name: n for n in body if isinstance(n, _FUNCTIONS)}


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
    return {name: frozenset(names) for name, names in sets.items()}


def methods_called(body: Sequence[ast.AST]) -> Iterator[str]:
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
    values: dict[str, list[ast.expr]] = {}
    for method in methods.values():
        for name, stmt in _set_on_self(method):
            if len(stmt.targets) == 1 and name.count(".") == 1:
                values.setdefault(name, []).append(stmt.value)
    attributes = {name: set_to[0] for name, set_to in values.items() if len(set_to) == 1}
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
