"""Every function of a file that trains, in normal form."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from .events import Event, Loop, Symbol
from .file_index import ClassIndex, FileIndex, index_file
from .reader import Env, Frame, Reader
from .syntax import FUNCTIONS, FunctionNode, assigned_names, dotted, is_call, last_part, names_in

_TRAINERS = {"Trainer", "Seq2SeqTrainer"}
_TELLS_TRAINER = {"compute_loss_func", "model_accepts_loss_kwargs"}
_BACKWARD = {"backward", "manual_backward", "training_step"}


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
    def loops(self) -> list[Loop]:
        """Return all loops that were read."""
        return self.reader.loops

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
        owner = self.index.class_around(getattr(self.reader.roots[root], "lineno", 0))
        roots = {0, root}
        if owner is not None:
            methods = set(owner.methods.values())
            roots.update(n for n, f in enumerate(self.reader.roots) if f in methods)
        return [event for root in sorted(roots) for event in self.by_root.get(root, ())]

    def framework(self, loop: Loop) -> str:
        """Return the framework that runs the backward of a step function's loss, or ""."""
        owner = self.index.class_around(loop.node.lineno) if loop.virtual else None
        return "" if owner is None else framework_of(owner, loop.node)  # type: ignore[arg-type]

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
    if index.relevant or not index.calls_by_name.keys().isdisjoint({"loss_scaler", *_BACKWARD}):
        _read(reader, index)
    return NormalFile(index, reader)


def _read(reader: Reader, index: FileIndex) -> None:
    names = reader.read_module()
    reader.globals = _settled(names, index.tree)
    roots: list[tuple[FunctionNode, ClassIndex | None]] = [
        (function, None) for function in index.functions.values()
    ]
    for owner in index.classes.values():
        roots += [(method, owner) for method in owner.methods.values()]
    roots = [root for root in roots if root[0] in index.relevant]
    # A function that the file calls is read from its caller: begin with the others.
    called = {*index.calls_by_name, "__init__"}
    for function, of in sorted(roots, key=lambda root: root[0].name in called):
        if function not in reader.covered:
            env = {**reader.globals, **({} if of is None else reader.class_names(of))}
            _read_root(reader, index, function, env, of, None)
    while True:  # Functions inside functions, which a framework may be handed: `Engine(update)`.
        inner = [f for f in reader.closures if f in index.relevant and f not in reader.covered]
        if not inner:
            return
        env, frame = reader.closures[inner[0]]
        _read_root(reader, index, inner[0], env, frame.owner, frame)


def _read_root(
    reader: Reader,
    index: FileIndex,
    function: FunctionNode,
    env: Env,
    owner: ClassIndex | None,
    frame: Frame | None,
) -> None:
    gives_loss = owner is not None and framework_of(owner, function) != ""
    as_loop = gives_loss or _steps_outside_loops(function, index, owner)
    reader.read_root(function, env, owner, as_loop=as_loop, gives_loss=gives_loss, frame=frame)


def framework_of(owner: ClassIndex, function: FunctionNode) -> str:
    """Return the framework that runs the backward of what a method returns, or ""."""
    own = owner.methods.get("training_step")
    if any(base.rpartition(".")[2] in _TRAINERS for base in owner.bases):
        # Its own training step, or a word to the Trainer, may divide the loss.
        words = names_in(owner.node)
        untold = _TELLS_TRAINER.isdisjoint(words) and "num_items_in_batch" not in words
        called = own is None or "compute_loss" in names_in(own)
        return "the Trainer" if function.name == "compute_loss" and called and untold else ""
    is_module = any("Module" in base for base in owner.bases)
    manual = any(
        isinstance(n, ast.Attribute) and n.attr == "automatic_optimization"
        for n in ast.walk(owner.node)
    )
    return "Lightning" if function is own and is_module and not manual else ""


def _settled(names: Env, tree: ast.Module) -> Env:
    """Return the module's names that are set once, outside of loops: functions rely on them."""
    counts: Counter[str] = Counter()
    todo: list[ast.AST] = list(tree.body)
    changed: set[str] = set()
    while todo:
        node = todo.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, (ast.For, ast.While, ast.AsyncFor)):
            changed |= assigned_names([node])
        elif isinstance(node, ast.stmt):
            if not hasattr(node, "body"):
                counts.update(assigned_names([node]))
            todo += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
            todo += [s for h in getattr(node, "handlers", ()) for s in h.body]
    return {n: v for n, v in names.items() if counts[n] == 1 and n not in changed}


def _steps_outside_loops(
    function: FunctionNode,
    index: FileIndex,
    owner: ClassIndex | None,
    around: tuple[FunctionNode, ...] = (),
) -> bool:
    """True if a function, or a helper that it calls, has a backward that is in no loop here."""
    if function.name == "training_step":
        return True  # Lightning calls it once per batch, wherever its helpers are.
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.For, ast.AsyncFor)):
            todo.append(node.iter)
            continue
        if isinstance(node, (ast.While, ast.ClassDef, ast.Lambda, *FUNCTIONS)):
            continue
        if isinstance(node, ast.Call):
            if last_part(node.func) in _BACKWARD:
                return True
            name = dotted(node.func) or ""
            helper = index.functions.get(name)
            if name.startswith("self.") and owner is not None:
                helper = owner.methods.get(name[5:])
            new = helper is not None and helper in index.relevant
            if new and helper not in (function, *around):
                assert helper is not None
                if _steps_outside_loops(helper, index, owner, (*around, function)):
                    return True
        todo += ast.iter_child_nodes(node)
    return False
