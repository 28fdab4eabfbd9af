"""Every function of a file that trains, in normal form."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from functools import cached_property

from .events import Event, Symbol
from .file_index import FileIndex, index_file
from .reader import Reader
from .syntax import FUNCTIONS, FunctionNode, is_call

_BACKWARD = ("backward", "manual_backward")


@dataclass(eq=False)
class NormalFile:
    """A file in normal form."""

    index: FileIndex
    reader: Reader

    @property
    def events(self) -> list[Event]:
        """Return all events, those of one function after those of another."""
        return self.reader.events

    @property
    def symbols(self) -> dict[str, Symbol]:
        """Return what each symbol stands for."""
        return self.reader.symbols

    @cached_property
    def by_root(self) -> dict[int, list[Event]]:
        """Return the events of each function that was read."""
        events: dict[int, list[Event]] = {}
        for event in self.events:
            events.setdefault(event.root, []).append(event)
        return events

    def around(self, root: int) -> list[Event]:
        """Return the events of a function, of the module itself and of the other methods."""
        owner = self.reader.roots[root]
        of_class = (
            [] if owner is None else [n for n, o in enumerate(self.reader.roots) if o is owner]
        )
        return [event for n in {0, root, *of_class} for event in self.by_root.get(n, ())]

    def value(self, expr: ast.AST | None) -> ast.AST | None:
        """Return what an expression stands for: the value of a symbol that was set."""
        for _ in range(20):
            expr = _unprepared(expr)
            symbol = self.symbols.get(getattr(expr, "id", ""))
            if symbol is None or symbol.kind != "set" or symbol.value is None:
                break
            expr = symbol.value
        return expr


def _unprepared(expr: ast.AST | None) -> ast.AST | None:
    """Return `loader` for what `accelerator.prepare(model, loader)` gives back at its place."""
    wraps = expr.value if isinstance(expr, ast.Subscript) else expr
    if not is_call(wraps, "prepare", "setup", "setup_dataloaders"):
        return expr
    at = getattr(getattr(expr, "slice", None), "value", 0 if len(wraps.args) == 1 else None)
    return wraps.args[at] if isinstance(at, int) and at < len(wraps.args) else expr


def normalise(source: str) -> NormalFile:
    """Return a file in normal form; raise SyntaxError as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About invalid escapes in the file's strings.
        tree = ast.parse(source)
    index = index_file(tree)
    reader = Reader(index)
    if not index.calls_by_name.keys().isdisjoint(_BACKWARD):
        _read(reader, index)
    return NormalFile(index, reader)


def _read(reader: Reader, index: FileIndex) -> None:
    reader.read_module()
    owners = {m: owner for owner in index.classes.values() for m in owner.methods.values()}
    # A function that the file calls is read from its caller: begin with the others.
    called = {*index.calls_by_name, "__init__"}
    for function in sorted(index.relevant, key=lambda f: (f.name in called, f.lineno)):
        if function not in reader.covered:
            is_step = function.name == "training_step" or _steps_outside_loops(function)
            reader.read_root(function, owners.get(function), as_loop=is_step)


def _steps_outside_loops(function: FunctionNode) -> bool:
    """True if a function has a backward that is in no loop: whoever calls it has the loop."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if is_call(node, *_BACKWARD):
            return True
        if not isinstance(node, (ast.For, ast.AsyncFor, ast.While, ast.ClassDef, *FUNCTIONS)):
            todo += ast.iter_child_nodes(node)
    return False
