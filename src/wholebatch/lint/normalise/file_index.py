"""The index of a file: its functions, classes, imports and calls, before anything is followed."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property

from .syntax import (
    FUNCTIONS,
    FunctionNode,
    assigned_names,
    dotted,
    is_binary,
    is_call,
    last_part,
    names_in,
    names_of,
    number,
    text,
)

# Calls that make a function a part of training: it is walked, or followed from its caller.
_TRAINING_CALLS = {
    "backward", "training_step", "manual_backward", "zero_grad", "unscale_", "clip_grad_norm_",
    "clip_grad_value_",
}  # fmt: skip
# What these names mean in a file that does not import them otherwise.
_USUAL = {"F": "torch.nn.functional", "nn": "torch.nn", "optim": "torch.optim"}


@dataclass(eq=False)
class ClassIndex:
    """A class of the file: its methods, and the attributes that it sets on self."""

    node: ast.ClassDef
    methods: dict[str, FunctionNode]
    attributes: dict[str, ast.expr]  # Set in the constructor.
    changed: set[str]  # Set by other methods too.


@dataclass(eq=False)
class FileIndex:
    """What a file holds, by name."""

    tree: ast.Module
    nodes: list[ast.AST]
    functions: dict[str, FunctionNode]
    classes: dict[str, ClassIndex]
    imports: dict[str, str]  # What each imported name stands for.

    def full_name(self, expr: ast.AST | None) -> str:
        """Return a dotted name as it is imported: `torch.nn.Linear` for `nn.Linear`."""
        head, dot, rest = (dotted(expr) or last_part(expr)).partition(".")
        return self.imports.get(head, _USUAL.get(head, head)) + dot + rest

    @cached_property
    def calls_by_name(self) -> dict[str, list[ast.Call]]:
        """Return the calls of the file by their last name."""
        calls: dict[str, list[ast.Call]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call):
                calls.setdefault(last_part(node.func), []).append(node)
        return calls

    @cached_property
    def multiples(self) -> set[str]:
        """Return what lengths are made a multiple of: `len(loader) % k`, `n // k * k`."""
        names: set[str] = set()
        for node in self.nodes:
            rest = is_binary(node, ast.Mod) and is_call(node.left, "len")
            product = is_binary(node, ast.Mult) and is_binary(node.left, ast.FloorDiv)
            if rest or (product and text(node.right) == text(node.left.right)):  # type: ignore[attr-defined]
                names |= {*names_in(node.right), text(node.right)}  # type: ignore[attr-defined]
        return names

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names in the file."""
        return names_of(self.nodes)

    @cached_property
    def has_ignored_labels(self) -> bool:
        """True if -100 is used other than as `ignore_index=`, as a default or in a comparison."""
        asked: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.keyword) and node.arg in {"ignore_index", "default"}:
                asked.add(id(node.value))
            elif isinstance(node, ast.arguments):
                asked.update(map(id, [*node.defaults, *node.kw_defaults]))
            elif isinstance(node, ast.Compare):
                asked.update(map(id, node.comparators))
            elif isinstance(node, ast.UnaryOp) and id(node) not in asked and number(node) == -100:
                return True
        return False

    @cached_property
    def relevant(self) -> set[FunctionNode]:
        """Return the functions that contain a training call, directly or in their helpers."""
        training: set[FunctionNode] = set()
        callers: dict[str, list[FunctionNode]] = {}
        for function in (n for n in self.nodes if isinstance(n, FUNCTIONS)):
            called = {last_part(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)}
            if called & _TRAINING_CALLS:
                training.add(function)
            for name in called:
                callers.setdefault(name, []).append(function)
        todo = list(training)
        while todo:
            for caller in callers.get(todo.pop().name, ()):
                if caller not in training:
                    training.add(caller)
                    todo.append(caller)
        return training


def parameters(function: FunctionNode) -> list[str]:
    """Return the names of the parameters of a function."""
    spec = function.args
    extra = [a.arg for a in (spec.vararg, spec.kwarg) if a is not None]
    return [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)] + extra


def index_file(tree: ast.Module) -> FileIndex:
    """Collect the functions, classes and imports of a file."""
    imports: dict[str, str] = {}
    classes: dict[str, ClassIndex] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            pairs = [(a.asname or a.name, f"{node.module or ''}.{a.name}") for a in node.names]
            imports.update(pairs)
        elif isinstance(node, ast.Import):
            named = [(a.asname or a.name.partition(".")[0], a) for a in node.names]
            imports.update((n, a.name if a.asname else n) for n, a in named)
        elif isinstance(node, ast.ClassDef):
            classes[node.name] = _index_class(node)
    return FileIndex(tree, nodes, _functions(tree.body), classes, imports)


def _functions(body: list[ast.stmt]) -> dict[str, FunctionNode]:
    return {n.name: n for n in body if isinstance(n, FUNCTIONS)}


def _index_class(node: ast.ClassDef) -> ClassIndex:
    methods = _functions(node.body)
    others = [m for name, m in methods.items() if name != "__init__"]
    changed = {n for m in others for n in assigned_names(m.body) if n.startswith("self.")}
    init = methods.get("__init__")
    attributes = {} if init is None else _attributes(init)
    return ClassIndex(node, methods, attributes, changed)


def _attributes(init: FunctionNode) -> dict[str, ast.expr]:
    """Return the values of the attributes that a constructor sets on self."""
    values: dict[str, ast.expr] = {}
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = dotted(node.targets[0]) or ""
            if name.startswith("self.") and name.count(".") == 1:
                values[name] = node.value
    return values
