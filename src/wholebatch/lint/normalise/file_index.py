"""The index of a file: its functions, classes, imports and calls, before anything is followed."""

from __future__ import annotations

import ast
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    text,
)

# Calls that make a function a part of training: it is walked, or followed from its caller.
_TRAINING_CALLS = {
    "backward", "training_step", "manual_backward", "loss_scaler", "zero_grad", "unscale_",
    "clip_grad_norm_", "clip_grad_value_", "optimizer_step",
}  # fmt: skip
# Methods whose loss a framework takes.
_GIVES_LOSS = {"training_step", "compute_loss"}
# What these names mean in a file that does not import them otherwise.
_USUAL = {"F": "torch.nn.functional", "nn": "torch.nn", "optim": "torch.optim"}


@dataclass(eq=False)
class ClassIndex:
    """A class of the file: its methods, and the attributes that it sets on self."""

    node: ast.ClassDef
    methods: dict[str, FunctionNode]
    bases: tuple[str, ...]
    attributes: dict[str, ast.expr]  # Set once, or to a literal at first.
    changed: dict[str, frozenset[str]]  # Set by each method, also through those that it calls.


@dataclass(eq=False)
class FileIndex:
    """What a file holds, by name."""

    tree: ast.Module
    nodes: list[ast.AST]
    calls: list[ast.Call]
    functions: dict[str, FunctionNode]
    classes: dict[str, ClassIndex]
    imports: dict[str, str]  # What each imported name stands for.
    every_function: list[FunctionNode] = field(default_factory=list)

    def full_name(self, expr: ast.AST | None) -> str:
        """Return a dotted name as it is imported: `torch.nn.Linear` for `nn.Linear`."""
        head, dot, rest = (dotted(expr) or last_part(expr)).partition(".")
        return self.imports.get(head, _USUAL.get(head, head)) + dot + rest

    @cached_property
    def calls_by_name(self) -> dict[str, list[ast.Call]]:
        """Return the calls of the file by their last name."""
        calls: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            calls.setdefault(last_part(call.func), []).append(call)
        return calls

    @cached_property
    def options(self) -> dict[str, list[tuple[ast.Call, ast.expr]]]:
        """Return the calls that are given each keyword argument, and its value."""
        given: dict[str, list[tuple[ast.Call, ast.expr]]] = {}
        for call in self.calls:
            for option in call.keywords:
                if option.arg is not None:
                    given.setdefault(option.arg, []).append((call, option.value))
        return given

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
    def relevant(self) -> set[FunctionNode]:
        """Return the functions that contain a training call, directly or in their helpers."""
        lines = [c.lineno for c in self.calls]
        uses: dict[FunctionNode, set[str]] = {}
        callers: dict[str, list[FunctionNode]] = {}
        for function in self.every_function:
            first = bisect_left(lines, function.lineno)
            last = bisect_right(lines, function.end_lineno or function.lineno)
            uses[function] = {last_part(c.func) for c in self.calls[first:last]}
            for name in uses[function]:
                callers.setdefault(name, []).append(function)
        relevant: set[FunctionNode] = set()
        todo = [f for f, used in uses.items() if used & _TRAINING_CALLS or f.name in _GIVES_LOSS]
        while todo:
            function = todo.pop()
            if function not in relevant:
                relevant.add(function)
                todo += callers.get(function.name, [])
        return relevant

    @cached_property
    def walruses(self) -> list[ast.NamedExpr]:
        """Return the assignments by `:=` of the file."""
        return [node for node in self.nodes if isinstance(node, ast.NamedExpr)]

    def functions_around(self, line: int) -> list[FunctionNode]:
        """Return the functions that contain a line, outermost first."""
        last = bisect_right(self.every_function, line, key=lambda f: f.lineno)
        near = self.every_function[max(0, last - 50) : last]
        return [f for f in near if line <= (f.end_lineno or f.lineno)]

    def class_around(self, line: int) -> ClassIndex | None:
        """Return the innermost class that contains a line."""
        around = [c for c in self.classes.values() if c.node.lineno <= line <= _end(c.node)]
        return max(around, key=lambda c: c.node.lineno, default=None)

    def words_around(self, line: int) -> list[str]:
        """Return the name and parameters of each function that contains a line."""
        around = self.functions_around(line)
        return [" ".join([f.name, *parameters(f)]) for f in around]


def parameters(function: FunctionNode) -> list[str]:
    """Return the names of the parameters of a function."""
    spec = function.args
    extra = [a.arg for a in (spec.vararg, spec.kwarg) if a is not None]
    return [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)] + extra


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def index_file(tree: ast.Module) -> FileIndex:
    """Collect the functions, classes, imports and calls of a file."""
    imports: dict[str, str] = {}
    owners: list[ast.ClassDef] = []
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            pairs = [(a.asname or a.name, f"{node.module or ''}.{a.name}") for a in node.names]
            imports.update(pairs)
        elif isinstance(node, ast.Import):
            named = [(a.asname or a.name.partition(".")[0], a) for a in node.names]
            imports.update((n, a.name if a.asname else n) for n, a in named)
        elif isinstance(node, ast.ClassDef):
            owners.append(node)
    classes = {o.name: _index_class(o) for o in sorted(owners, key=lambda o: o.lineno)}
    for owner in classes.values():
        _inherit(owner, classes)
    return FileIndex(
        tree=tree,
        nodes=nodes,
        calls=sorted(calls, key=lambda c: (c.lineno, c.col_offset)),
        functions=_functions(tree.body),
        classes=classes,
        imports=imports,
        every_function=sorted(functions, key=lambda f: f.lineno),
    )


def _functions(body: list[ast.stmt]) -> dict[str, FunctionNode]:
    return {n.name: n for n in body if isinstance(n, FUNCTIONS)}


def _index_class(node: ast.ClassDef) -> ClassIndex:
    methods = _functions(node.body)
    bases = tuple(dotted(b) or "" for b in node.bases)
    return ClassIndex(node, methods, bases, _attributes(methods), _changes(methods))


def _inherit(owner: ClassIndex, classes: dict[str, ClassIndex]) -> None:
    """Give a class what it inherits from classes of the file."""
    for base in owner.bases:
        parent = classes.get(base)
        if parent is not None and parent is not owner:
            owner.methods = parent.methods | owner.methods
            owner.attributes = parent.attributes | owner.attributes
            owner.changed = parent.changed | owner.changed


def methods_called(body: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the `name` of every `self.name` in the statements: called, or handed on."""
    for stmt in body:
        for node in ast.walk(stmt):
            if isinstance(node, ast.Attribute) and dotted(node.value) == "self":
                yield node.attr


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


def _attributes(methods: dict[str, FunctionNode]) -> dict[str, ast.expr]:
    """Return the values of the attributes that are set once on self, or to a literal at first."""
    values: dict[str, list[ast.expr]] = {}
    literals: dict[str, ast.expr] = {}
    for method in methods.values():
        for name, value in _set_on_self(method):
            values.setdefault(name, []).append(value)
            # A counter that starts in __init__ and changes elsewhere still has a known start.
            if method.name == "__init__" and isinstance(value, ast.Constant):
                literals[name] = value
    return {name: set_to[0] for name, set_to in values.items() if len(set_to) == 1} | literals


def _set_on_self(method: FunctionNode) -> Iterator[tuple[str, ast.expr]]:
    for stmt in ast.walk(method):
        if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1:
            for target, value in _pairs(stmt.targets[0], stmt.value):
                name = dotted(target) or ""
                if name.startswith("self.") and name.count(".") == 1:
                    yield name, value


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return the pairs of `self.a, self.b = a, b`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]
