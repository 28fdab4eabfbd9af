"""Facts about the whole file: its functions and classes, its wrappers, and the names it sets."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from .events import Def, Env
from .expressions import (
    FunctionNode,
    assigned_names,
    children,
    dotted,
    keyword,
    last_part,
    number,
    text,
    walk,
)
from .imported_code import Definition, Imports, imported, is_local, visible

_ACTS = {
    "backward", "training_step", "manual_backward", "loss_scaler", "zero_grad", "unscale_",
    "clip_grad_norm_", "clip_grad_value_", "optimizer_step", "apply_gradients", "gradient",
}  # fmt: skip
_FSDP = {"FullyShardedDataParallel", "FSDP", "fully_shard", "FSDPStrategy"}
# A function of another module that acts on the window; one with a loop of its own is read there.
_ACTING = re.compile(r"\bbackward\(|\.step\(|zero_grad\(|clip_grad_")
_OWN_LOOP = re.compile(r"\n\s+(for|while)\b(.|\n)*backward\(")
# A helper from another file, recognised by its name: `wrap_model_with_fsdp(model)`.
_FSDP_HELPER = re.compile(
    r"(wrap|apply|setup|shard|parallelize)\w*(?<!xla)_fsdp2?$|^fsdp2?_(wrap|shard)", re.I
)

_WRAPS = re.compile(r"parallel|shard|fsdp|wrap|distribut", re.I)
_SHARDS = re.compile(r"\b(fully_shard|FSDP|FullyShardedDataParallel)\(")
_REPLICATES = re.compile(r"\b(DDP|DistributedDataParallel)\(")

_TOLD = {
    ast.FunctionDef, ast.AsyncFunctionDef, ast.arg, ast.Assign, ast.ImportFrom, ast.Import,
    ast.ClassDef,
}  # fmt: skip
_USED = re.compile(r"(?<![\w.])(?:[a-z_]\w*\.)?(?:[a-z_]\w*(?=\()|[A-Z]\w+)\b|(?<=collate_fn=)\w+")
DATA = re.compile(r"collat|dataset|loader", re.I)
_MAX_PARTS = 20
_LEVELS = 4


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
    import_nodes: Imports
    uses: dict[FunctionNode, set[str]]
    # The classes that parameters of each name, and `name()` of functions, are annotated with.
    annotated: dict[str, set[str]]
    path: str = ""
    _searched: dict[re.Pattern[str], bool] = field(default_factory=dict)
    _imported: dict[str, Definition | None] = field(default_factory=dict)
    _assignments: dict[FunctionNode, Env] = field(default_factory=dict)

    def mentions(self, pattern: re.Pattern[str]) -> bool:
        """True if the source matches a pattern; each pattern is searched for once."""
        if pattern not in self._searched:
            self._searched[pattern] = pattern.search(self.source) is not None
        return self._searched[pattern]

    def imported(self, name: str) -> Definition | None:
        """Return the class or function of a local module that a name of this file stands for."""
        if name not in self._imported:
            found = imported(self.import_nodes, self.path, name) if self.path and name else None
            self._imported[name] = found
        return self._imported[name]

    def behind(self, name: str) -> str:
        """Return the source of the classes and functions that made what a name stands for."""
        found = []
        values: list[ast.expr | None] = [*self.assigned.get(name, ())]
        for value in values[:_LEVELS]:  # `model = base`, `model = torch.compile(base)`
            inner = value.args[0] if isinstance(value, ast.Call) and value.args else value
            other = dotted(inner) if inner is not None else None
            values += self.assigned.get(other, ()) if other and other != name else ()
        handed = {dotted(v) or "" for v in values if v is not None} | {name}
        handed |= {f"{last_part(v.func)}()" for v in values if isinstance(v, ast.Call)}
        named = {m for n in handed for m in self.annotated.get(n, ())}
        if any("model_class" in text(v) for v in values if v is not None):
            # `MODEL_CLASSES = {"bert": (BertConfig, BertForNer, BertTokenizer)}`
            held = [
                v for values in self.assigned.values() for v in values if isinstance(v, ast.Dict)
            ]
            named |= {n.id for v in held for n in walk(v) if isinstance(n, ast.Name)}
        values += [ast.Call(ast.Name(made), [], []) for made in named]
        for value in values:
            while isinstance(value, ast.Call):
                made = dotted(value.func) or ""
                head = made.partition(".")[0]
                # `Model = Small if args.small else Large`
                chosen = [n for v in self.assigned.get(head, ()) for n in walk(v)]
                names = {head, made, *(n.id for n in chosen if isinstance(n, ast.Name))}
                found += [text(c.node) for c in self.classes if c.node.name in names]
                known = [self.imported(name) for name in sorted(names)]
                found += [definition.text for definition in known if definition is not None]
                value = value.func.value if isinstance(value.func, ast.Attribute) else None
        return "\n".join(found)

    def imported_parts(self, call: ast.Call, levels: int = 1) -> list[str]:
        """Return the source of an imported definition and of those it uses, some levels deep."""
        found = self.imported(dotted(call.func) or "")
        parts: dict[str, Definition] = {} if found is None else {"": found}
        for _ in range(levels):
            for part in list(parts.values()):
                names = _USED.findall(part.text)
                for name in [n for n in dict.fromkeys(names) if n not in parts][:_MAX_PARTS]:
                    used = visible(part.path, name)
                    if used is not None:
                        parts[name] = used
        return [part.text for part in parts.values()]

    def helpers(self, pattern: re.Pattern[str]) -> list[tuple[ast.Call, Definition]]:
        """Return the calls of imported functions and classes whose last name matches a pattern."""
        calls = [c for c in self.calls if pattern.search(last_part(c.func))]
        known = [(call, self.imported(dotted(call.func) or "")) for call in calls]
        return [(call, found) for call, found in known if found is not None]

    @cached_property
    def data_parts(self) -> list[str]:
        """Return the source of the imported loaders, datasets and collators, and what they use."""
        calls = [c for c in self.calls if DATA.search(last_part(c.func))]
        handed = [k.value for c in calls for k in c.keywords if k.arg == "collate_fn"]
        calls += [ast.Call(collate, [], []) for collate in handed]
        return [part for call in calls for part in self.imported_parts(call)]

    def made(self, *names: str) -> list[ast.Call]:
        """Return the calls whose last name is one of these: `DDP(...)`, `nn.BatchNorm2d(...)`."""
        return [c for c in self.calls if last_part(c.func) in names]

    @cached_property
    def endings(self) -> dict[str, list[str]]:
        """Return the assigned names by their endings: `self.my_optimizer` by `optimizer`."""
        found: dict[str, list[str]] = {}
        for name in self.assigned:
            for at in (0, *(m.end() for m in re.finditer(r"[._]", name))):
                found.setdefault(name[at:], []).append(name)
        return found

    @cached_property
    def wraps_fsdp(self) -> bool:
        """True if this file shards a model."""
        asked = [c.args[1] for c in self.made("isinstance") if len(c.args) > 1]
        if self.made(*_FSDP) or any(last_part(kind) in _FSDP for kind in asked):
            return True
        return any(map(_FSDP_HELPER.search, self.called)) or any(
            _SHARDS.search(helper.text) and not _REPLICATES.search(helper.text)
            for _, helper in self.helpers(_WRAPS)
        )

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

    def reaches(self, caller: FunctionNode, called: FunctionNode) -> bool:
        """True if a function calls another one of the file, directly or through others."""
        names = {caller.name}
        for _ in range(_LEVELS):
            names |= {n for f, used in self.uses.items() if f.name in names for n in used}
        return called.name in names

    def env_around(self, node: ast.AST) -> Env:
        """Return the assignments of the function that a node is in."""
        around = self.functions_around(getattr(node, "lineno", 0))
        if around and around[-1] not in self._assignments:
            self._assignments[around[-1]] = flat_env(walk(around[-1]))
        return self._assignments[around[-1]] if around else Env()

    def functions_around(self, line: int) -> list[FunctionNode]:
        """Return the functions that contain a line."""
        last = bisect_right(self.every_function, line, key=lambda f: f.lineno)
        near = self.every_function[max(0, last - 50) : last]
        return [f for f in near if line <= (f.end_lineno or f.lineno)]


def gather(tree: ast.Module, source: str, path: str = "") -> Facts:
    """Collect everything from the file that is not about one loop."""
    calls: list[ast.Call] = []
    imports: set[str] = set()
    nodes: Imports = []
    annotated: dict[str, set[str]] = {}
    owners: list[ast.ClassDef] = []
    uses: dict[FunctionNode, set[str]] = {}
    assigned: dict[str, list[ast.expr]] = {}
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        kind = type(node)
        if kind is ast.Name or kind is ast.Constant:
            continue
        todo += children(node)
        if kind is ast.Call:
            calls.append(cast(ast.Call, node))
        elif kind not in _TOLD:
            continue
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            uses[node] = set()
            if isinstance(node.returns, ast.Name):
                annotated.setdefault(f"{node.name}()", set()).add(node.returns.id)
        elif isinstance(node, ast.arg):
            if isinstance(node.annotation, ast.Name):
                annotated.setdefault(node.arg, set()).add(node.annotation.id)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                assigned.setdefault(dotted(target) or "", []).append(node.value)
        elif isinstance(node, ast.ImportFrom):
            nodes.append(node)
            imports.add(node.module or "")
            imports.update(f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Import):
            nodes.append(node)
            imports.update(a.name for a in node.names)
        elif isinstance(node, ast.ClassDef):
            owners.append(node)
    functions = _functions(tree.body)
    calls.sort(key=lambda c: (c.lineno, c.col_offset))
    _fill_uses(uses, calls)
    called = {last_part(c.func) for c in calls}
    classes = [_class(o) for o in sorted(owners, key=lambda o: o.lineno)]
    _inherit(classes)
    ordered = sorted(uses, key=lambda f: f.lineno)
    nodes = [node for node in nodes if path and is_local(node, path)]
    facts = Facts(
        tree, source, functions, classes, calls, called, imports, set(), ordered, assigned, nodes,
        uses, annotated, path,
    )  # fmt: skip
    facts.relevant = _relevant(uses, _acting(facts))
    return facts


def flat_env(nodes: Iterable[ast.AST]) -> Env:
    """Return the last assignment of each name among the nodes: enough to follow a name."""
    env = Env()
    assigns = [node for node in nodes if isinstance(node, ast.Assign)]
    for node in sorted(assigns, key=lambda a: a.lineno):
        env.bind(dotted(node.targets[0]) or "", (Def(node.value, env, ()),))
    return env


def _acting(facts: Facts) -> set[str]:
    """Return the names of the imported functions that act on the window of their caller."""
    heads = {(a.asname or a.name) for node in facts.import_nodes for a in node.names}
    names = {dotted(c.func) or "" for c in facts.calls} if facts.path else set()
    found = {n: facts.imported(n) for n in names if n.partition(".")[0] in heads}
    return {n.rpartition(".")[2] for n, d in found.items() if d is not None and acts(d.text)}


def acts(source: str) -> bool:
    """True if a function of another module is a part of the loop that calls it."""
    is_function = source.startswith("def ")
    return is_function and bool(_ACTING.search(source)) and not _OWN_LOOP.search(source)


def _fill_uses(uses: dict[FunctionNode, set[str]], calls: list[ast.Call]) -> None:
    """Add each call, by its line, to the calls of every function around it."""
    lines = [c.lineno for c in calls]
    for function, names in uses.items():
        first = bisect_left(lines, function.lineno)
        last = bisect_right(lines, function.end_lineno or function.lineno)
        names.update(last_part(c.func) for c in calls[first:last])


def _relevant(uses: dict[FunctionNode, set[str]], acting: set[str]) -> set[FunctionNode]:
    """Return the functions that contain a training call, directly or in their helpers."""
    names = _ACTS | acting
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
        for node in walk(stmt):
            if isinstance(node, ast.Attribute) and dotted(node.value) == "self":
                yield node.attr


def _inherit(classes: list[ClassFacts]) -> None:
    """Give classes what they inherit in the file; an abstract method is that of a subclass."""
    by_name = {c.node.name: c for c in classes}
    for owner in classes:
        for base in (by_name[b] for b in owner.bases if b in by_name and b != owner.node.name):
            for name, method in list(base.methods.items()):
                if _is_abstract(method) and name in owner.methods:
                    base.methods[name] = owner.methods[name]
                    base.changed[name] = owner.changed[name]
                owner.methods.setdefault(name, base.methods[name])
            owner.attributes = base.attributes | owner.attributes
            owner.changed = base.changed | owner.changed


def _is_abstract(method: FunctionNode) -> bool:
    last = method.body[-1]
    raised = getattr(last, "exc", None) if isinstance(last, ast.Raise) else None
    return raised is not None and "NotImplementedError" in ast.dump(raised)


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
    for stmt in walk(method):
        if isinstance(stmt, ast.Assign):
            name = dotted(stmt.targets[0]) or ""
            if name.startswith("self."):
                yield name, stmt


def class_env(facts: ClassFacts, env: Env) -> Env:
    """Return the environment of a method: the module's names and the class's attributes on self."""
    inner = Env(env)
    for name, value in facts.attributes.items():
        inner.bind(name, (Def(value, env, ()),))
    return inner
