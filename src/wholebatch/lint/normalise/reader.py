"""The walk of a function from top to bottom, which writes it in normal form.

A local helper, method or `forward` is read in place of its call. A name stands for what it was
assigned: a simple value replaces it, another becomes a symbol (`loss@7`) that knows its value. In
a loop, a name that the body changes is a symbol for "its value in this iteration", so a counter
reads the same in `for i in range(n)` and in a `while` loop that adds 1.
"""

from __future__ import annotations

import ast
import re
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field

from .call_kinds import HOLDS_SYNC, effect_of, is_gradient
from .events import Condition, Context, Effect, Event, Loop, PathItem, Symbol
from .file_index import ClassIndex, FileIndex, methods_called, parameters
from .syntax import (
    FunctionNode,
    assigned_names,
    changed,
    dotted,
    is_call,
    keyword,
    last_part,
    names_in,
    slot_name,
    target_names,
    text,
)

Env = dict[str, ast.expr]
_LoopNode = ast.For | ast.AsyncFor | ast.While
_MAX_DEPTH = 6
_MAX_INLINES = 250
_MAX_LINES = 120
_MAX_SIMPLE = 40
_PURE_CALLS = {"int", "float", "max", "min", "len", "bool", "abs", "round", "divmod", "range"}
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp)
# Calls that give back a model that they wrap or move.
_WRAPS = {
    "compile", "DistributedDataParallel", "DDP", "DataParallel", "FSDP", "to", "cuda", "train",
    "eval", "float", "double", "half", "bfloat16", "prepare", "prepare_model", "setup", "cpu",
    "FullyShardedDataParallel", "requires_grad_",
}  # fmt: skip
_LOSS = re.compile(r"loss|nll|criterion|objective|entropy", re.I)
_OF_GRADIENTS = {"zero_", "mul_", "div_", "detach_", "norm", "requires_grad_"}
_MARK = re.compile(r"@\d+")
_NOTHING = ast.Constant(value=None)


@dataclass(eq=False)
class Frame:
    """One call that is read: its function, and what can be called by name in it."""

    function: FunctionNode | None
    functions: ChainMap[str, FunctionNode]
    owner: ClassIndex | None = None
    depth: int = 0
    base: int = 0  # Length of the path to its call.
    gives_loss: bool = False  # A framework runs the backward of what it returns.
    returns: list[tuple[list[Condition], ast.expr]] = field(default_factory=list)


@dataclass
class _Exit:
    """A way out of a block before its end: its kind and its conditions."""

    kind: str
    conditions: tuple[tuple[ast.expr, bool], ...] = ()

    def negated(self) -> Condition:
        """Return the condition of everything behind it."""
        origin = "skip" if self.kind == "continue" else "break"
        if len(self.conditions) == 1:
            test, positive = self.conditions[0]
            return Condition(test, not positive, origin)
        parts = [t if positive else ast.UnaryOp(ast.Not(), t) for t, positive in self.conditions]
        return Condition(ast.BoolOp(ast.And(), parts), False, origin)


class Reader:
    """Reads the functions of one file; its events, loops and symbols are the normal form."""

    def __init__(self, index: FileIndex) -> None:
        self.index = index
        self.events: list[Event] = []
        self.loops: list[Loop] = []
        self.symbols: dict[str, Symbol] = {}
        self.roots: list[ast.AST] = [index.tree]
        self.covered: set[FunctionNode] = set()
        # Functions inside functions: what their names mean there.
        self.closures: dict[FunctionNode, tuple[Env, Frame]] = {}
        self.globals: Env = {}
        self._env: Env = {}
        self._path: tuple[PathItem, ...] = ()
        self._frame = Frame(None, ChainMap(index.functions))
        self._quiet = False
        self._inlines = 0
        self._reading: list[FunctionNode] = []
        self._owners: set[str] = set()  # Names with slots: `state` of `state['step']`.
        self._worth: dict[FunctionNode, bool] = {}

    # -- entry points ------------------------------------------------------------------------

    def read_module(self) -> Env:
        """Read what the module itself runs, and return its names."""
        self._frame = Frame(None, ChainMap({}, self.index.functions))
        self._block(self.index.tree.body)
        return self._env

    def read_root(
        self,
        function: FunctionNode,
        env: Env,
        owner: ClassIndex | None,
        *,
        as_loop: bool,
        gives_loss: bool = False,
        frame: Frame | None = None,
    ) -> None:
        """Read a function that no other that is read calls; `as_loop` if its loop is elsewhere."""
        self.roots.append(function)
        self.covered.add(function)
        functions = self.index.functions if frame is None else frame.functions
        self._frame = Frame(function, ChainMap({}, functions), owner, 1, gives_loss=gives_loss)
        names = parameters(function)
        self._env = {name: value for name, value in env.items() if name not in names}
        self._path = ()
        if as_loop:
            loop = Loop(function, len(self.loops), ())
            self._path = (loop,)
            self._enter(loop, function.body)
            for name in (n for n in names if n not in {"self", "cls"}):
                kind = "target" if name in {"batch_idx", "batch_index", "batch_nb"} else "carried"
                self._env[name] = self._symbol(name, kind, (loop,))
            self._block(function.body)
            loop.after = self._env
        else:
            self._block(function.body)
        self._path = ()

    def class_names(self, owner: ClassIndex, call: ast.Call | None = None) -> Env:
        """Return the attributes of an instance as its methods see them, `self.x`."""
        names = dict(self.globals)
        init = owner.methods.get("__init__")
        if init is not None:
            given = {} if call is None else _bound(call, init)
            for name in parameters(init):
                names.pop(name, None)
            names.update(given)
        kept, self._env, self._quiet = self._env, names, True
        attributes: Env = {}
        for name, value in owner.attributes.items():
            changes = [m for m, sets in owner.changed.items() if name in sets]
            is_setting = not isinstance(value, ast.Constant) or changes == ["__init__"]
            if is_setting or any(m != "__init__" for m in changes):
                attributes[name] = self._stored(name, self.evaluate(value))
        self._env, self._quiet = kept, False
        return attributes

    # -- statements --------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt]) -> list[_Exit]:
        """Read statements in order; a conditional `continue` is a condition of all behind it."""
        path, exits = self._path, []
        for stmt in body:
            for leaving in self._statement(stmt):
                exits.append(leaving)
                if not leaving.conditions:
                    self._path = path
                    return exits
                if leaving.kind != "raise":  # An error is no way of waiting.
                    self._path = (*self._path, leaving.negated())
        self._path = path
        return exits

    def _statement(self, stmt: ast.stmt) -> list[_Exit]:
        if isinstance(stmt, ast.Expr):
            self._expression(stmt.value)
        elif isinstance(stmt, ast.Assign):
            value = self.evaluate(stmt.value)
            for target in stmt.targets:
                self._assign(target, value)
        elif isinstance(stmt, ast.AugAssign):
            self._augment(stmt)
        elif isinstance(stmt, ast.If):
            return self._if(stmt)
        elif isinstance(stmt, (ast.For, ast.AsyncFor, ast.While)):
            self._loop(stmt)
        elif isinstance(stmt, (ast.With, ast.AsyncWith)):
            return self._with(stmt)
        elif isinstance(stmt, ast.Return):
            if stmt.value is not None:
                value = self.evaluate(stmt.value)
                if self._frame.gives_loss:
                    self._emit(Effect("backward", None, value, "framework"), stmt.value)
                inside = self._path[self._frame.base :]
                conditions = [i for i in inside if isinstance(i, Condition) and i.origin == "if"]
                self._frame.returns.append((conditions, value))
            return [_Exit("return")]
        elif isinstance(stmt, (ast.Raise, ast.Break, ast.Continue)):
            return [_Exit(type(stmt).__name__.lower())]
        elif isinstance(stmt, ast.AnnAssign):
            if stmt.value is not None:
                self._assign(stmt.target, self.evaluate(stmt.value))
        elif isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if self._frame.function is not None or self._path:
                self._frame.functions[stmt.name] = stmt
                self.closures[stmt] = (self._env, self._frame)
        elif isinstance(stmt, ast.Try):
            self._try(stmt)
        return []

    def _expression(self, expr: ast.expr) -> None:
        value = self.evaluate(expr)
        if is_call(expr, "mul_", "div_") and isinstance(expr.func, ast.Attribute) and expr.args:
            name = slot_name(expr.func.value)
            if name in self._env and isinstance(value, ast.Call):
                op = ast.Mult() if expr.func.attr == "mul_" else ast.Div()
                scaled = ast.BinOp(self._env[name], op, value.args[0])
                self._env[name] = self._stored(name, ast.copy_location(scaled, expr))

    def _augment(self, stmt: ast.AugAssign) -> None:
        value = ast.copy_location(ast.BinOp(stmt.target, stmt.op, stmt.value), stmt)
        if is_gradient(stmt.target):
            kind = "rescale" if isinstance(stmt.op, (ast.Mult, ast.Div)) else "by_hand"
            self._emit(Effect(kind, stmt.target, self.evaluate(stmt.value)), stmt)
            return
        self._assign(stmt.target, self.evaluate(value))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for at, element in enumerate(target.elts):
                self._assign(element, self._select(value, at))
            return
        target = target.value if isinstance(target, ast.Starred) else target
        name = slot_name(target)
        if is_gradient(target):
            if isinstance(value, ast.Constant):
                self._emit(Effect("clear", self._whose(target)), target)
            else:
                kind = "rescale" if _is_scaled(value) else "by_hand"
                self._emit(Effect(kind, target, value), target)
            return
        if HOLDS_SYNC.fullmatch(last_part(target)):
            self._emit(Effect("hold_sync", target), target)
        if name is not None:
            if name in self._owners:
                for slot in [n for n in self._env if n.startswith((f"{name}[", f"{name}."))]:
                    del self._env[slot]
            if not name.isidentifier():
                self._owners.add(re.split(r"[.\[]", name)[0])
            self._env[name] = self._stored(name, value)

    def _stored(self, name: str, value: ast.expr) -> ast.expr:
        """Return what stands for a name from now on: a simple value itself, or a symbol."""
        if is_simple(value):
            return value
        loops = tuple(item for item in self._path if isinstance(item, Loop))
        return self._symbol(name, "set", loops, value)

    def _symbol(
        self, name: str, kind: str, loops: tuple[Loop, ...], value: ast.expr | None = None
    ) -> ast.Name:
        key = f"{_MARK.sub('', name)}@{len(self.symbols)}"
        self.symbols[key] = Symbol(name, kind, loops, value)
        symbol = ast.Name(key, ast.Load())
        return symbol if value is None else ast.copy_location(symbol, value)

    def _if(self, stmt: ast.If) -> list[_Exit]:
        test = self.evaluate(stmt.test)
        before, path = self._env, self._path
        exits: list[_Exit] = []
        ends: list[tuple[Env, bool]] = []
        for body, positive in ((stmt.body, True), (stmt.orelse, False)):
            self._env, self._path = dict(before), (*path, Condition(test, positive))
            left = self._block(body)
            ends.append((self._env, any(not e.conditions for e in left)))
            exits += [_Exit(e.kind, ((test, positive), *e.conditions)) for e in left]
        self._path = path
        (yes, yes_ended), (no, no_ended) = ends
        if yes_ended and no_ended:
            self._env = yes
            return [_Exit("both")]
        if yes_ended or no_ended:
            self._env = no if yes_ended else yes
            return exits
        self._env = yes
        for name in {name for name, _ in yes.items() ^ no.items()}:
            pair = yes.get(name), no.get(name)
            if pair[0] is None or pair[1] is None:
                yes[name] = pair[0] or pair[1]  # type: ignore[assignment]
            elif text(pair[0]) != text(pair[1]):
                yes[name] = self._stored(name, choice(test, *pair))  # type: ignore[arg-type]
        return exits

    def _with(self, stmt: ast.With | ast.AsyncWith) -> list[_Exit]:
        path = self._path
        for item in stmt.items:
            value = self.evaluate(item.context_expr)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value)
            self._path = (*self._path, Context(value))
            if self.holds_sync(value):
                self._emit(Effect("hold_sync"), item.context_expr)
        exits = self._block(stmt.body)
        self._path = path
        return exits

    def holds_sync(self, context: ast.expr) -> bool:
        """True if a `with` item is, or may be, a `no_sync()`."""
        return any(map(HOLDS_SYNC.fullmatch, self.names_behind(context)))

    def names_behind(self, expr: ast.expr) -> set[str]:
        """Return the names in an expression, and in what its own symbols stand for."""
        names = set(names_in(expr))
        known = [self.symbols[n].value for n in names if n in self.symbols]
        return names.union(*(names_in(value) for value in known if value is not None))

    def _try(self, stmt: ast.Try) -> None:
        self._block(stmt.body)
        path, env = self._path, self._env
        for handler in stmt.handlers:
            self._env = dict(env)
            self._path = (*path, Condition(ast.Constant(value="except"), True, "except"))
            self._block(handler.body)
        self._path, self._env = path, env
        self._block(stmt.orelse)
        self._block(stmt.finalbody)

    def _loop(self, stmt: _LoopNode) -> None:
        path, before = self._path, dict(self._env)
        parents = tuple(item for item in path if isinstance(item, Loop))
        loop = Loop(stmt, len(self.loops), parents)
        if isinstance(stmt, ast.While):
            self._path = (*path, loop)
            entered = self._enter(loop, stmt.body)
            self.evaluate(stmt.test)
        else:
            loop.target, loop.iterable = stmt.target, self.evaluate(stmt.iter)
            # `for p in model.parameters(): p.grad = None` is one event of the loop around it.
            if "parameters()" not in text(loop.iterable):
                self._path = (*path, loop)
            entered = self._enter(loop, stmt.body)
        self._block(stmt.body)
        loop.after = dict(self._env)
        self._path = path
        # An attribute that might have changed, but did not, keeps its value.
        for name, symbol in entered.items():
            if name in before and self._env.get(name) is symbol:
                self._env[name] = before[name]
        self._block(stmt.orelse)

    def _enter(self, loop: Loop, body: Sequence[ast.AST]) -> Env:
        """Give every name that the loop changes a symbol for its value in this iteration."""
        self.loops.append(loop)
        around = (*loop.parents, loop)
        names = assigned_names(body)
        first, last = loop.node.lineno, loop.node.end_lineno or loop.node.lineno
        names |= {w.target.id for w in self.index.walruses if first <= w.lineno <= last}
        owner = self._frame.owner
        if owner is not None:
            called = set(owner.changed) if loop.virtual else set(methods_called(body))
            kept = [owner.changed.get(n, frozenset()) for n in called - {"__init__", "setup"}]
            names = names.union(*kept)
        entered: Env = {}
        for name in names:
            entered[name] = self._symbol(name, "carried", around, self._env.get(name))
        if loop.target is not None:
            for name in target_names(loop.target):
                entered[name] = self._symbol(name, "target", around)
        self._env = {**self._env, **entered}
        return entered

    # -- expressions -------------------------------------------------------------------------

    def evaluate(self, expr: ast.expr) -> ast.expr:
        """Return an expression in normal form, and record the calls in it."""
        if isinstance(expr, ast.Constant):
            return expr
        if isinstance(expr, ast.Name):
            return self._env.get(expr.id, expr)
        if isinstance(expr, ast.Attribute):
            return self._attribute(expr)
        if isinstance(expr, ast.Call):
            return self._call(expr)
        if isinstance(expr, ast.BinOp):
            left, right = self.evaluate(expr.left), self.evaluate(expr.right)
            return changed(expr, left=left, right=right)
        if isinstance(expr, ast.Subscript):
            name = slot_name(expr)
            if name is not None and name in self._env:
                return self._env[name]
            owner, index = self.evaluate(expr.value), self.evaluate(expr.slice)
            if isinstance(index, ast.Constant):
                return self._select(owner, index.value, expr)
            return changed(expr, value=owner, slice=index)
        if isinstance(expr, ast.Compare):
            if is_gradient(expr.left) and len(expr.ops) == 1:  # `p.grad is not None`
                return expr
            return self._generic(expr)
        if isinstance(expr, (ast.IfExp, ast.BoolOp)):
            return self._branches(expr)
        if isinstance(expr, ast.NamedExpr):
            value = self.evaluate(expr.value)
            self._assign(expr.target, value)
            return self._env.get(expr.target.id, value)
        if isinstance(expr, (ast.ListComp, ast.GeneratorExp)):
            generators = [changed(g, iter=self.evaluate(g.iter)) for g in expr.generators]
            return changed(self._generic(expr), generators=generators)
        return expr if isinstance(expr, ast.Lambda) else self._generic(expr)

    def _generic(self, expr: ast.expr) -> ast.expr:
        fields: dict[str, object] = {}
        for name in expr._fields:
            value = getattr(expr, name, None)
            if isinstance(value, ast.expr):
                fields[name] = self.evaluate(value)
            elif isinstance(value, list):
                fields[name] = [self.evaluate(v) if isinstance(v, ast.expr) else v for v in value]
        return changed(expr, **fields)

    def _attribute(self, expr: ast.Attribute) -> ast.expr:
        name = dotted(expr)
        if name is not None and name in self._env:
            return self._env[name]
        owner = self.evaluate(expr.value)
        if expr.attr == "grad" and not self._quiet:
            self._emit(Effect("by_hand", owner), expr)
        symbol = self.symbols.get(getattr(owner, "id", ""))
        if symbol is not None and symbol.kind == "set":
            given = keyword(symbol.value, expr.attr)  # `Output(loss=loss).loss`
            if given is not None:
                return given
        return expr if owner is expr.value else changed(expr, value=owner)

    def _select(self, value: ast.expr, at: object, source: ast.Subscript | None = None) -> ast.expr:
        """Return one part of a value: of a tuple, a dictionary, or of either branch."""
        symbol = self.symbols.get(getattr(value, "id", ""))
        inner = symbol.value if symbol is not None and symbol.kind == "set" else value
        if isinstance(inner, (ast.Tuple, ast.List)) and isinstance(at, int):
            starred = any(isinstance(e, ast.Starred) for e in inner.elts)
            if not starred and -len(inner.elts) <= at < len(inner.elts):
                return inner.elts[at]
        if isinstance(inner, ast.Dict):
            for key, part in zip(inner.keys, inner.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == at:
                    return part
        if isinstance(inner, ast.IfExp):
            yes, no = (self._select(part, at, source) for part in (inner.body, inner.orelse))
            return choice(inner.test, yes, no)
        if source is not None:
            return changed(source, value=value)
        part = ast.Subscript(value, ast.Constant(value=at), ast.Load())  # type: ignore[arg-type]
        return ast.copy_location(part, value)

    def _branches(self, expr: ast.IfExp | ast.BoolOp) -> ast.expr:
        """Read `step() if last else None` and `last and step()` as conditions too."""
        path = self._path
        if isinstance(expr, ast.IfExp):
            test = self.evaluate(expr.test)
            self._path = (*path, Condition(test, True))
            body = self.evaluate(expr.body)
            self._path = (*path, Condition(test, False))
            orelse = self.evaluate(expr.orelse)
            self._path = path
            return changed(expr, test=test, body=body, orelse=orelse)
        values = []
        for value in expr.values:
            values.append(self.evaluate(value))
            self._path = (*self._path, Condition(values[-1], isinstance(expr.op, ast.And)))
        self._path = path
        return changed(expr, values=values)

    def _call(self, node: ast.Call) -> ast.expr:
        func = node.func
        # What these do to a gradient is seen; of another use, nobody knows what becomes of it.
        is_seen = last_part(func) in _OF_GRADIENTS and is_gradient(getattr(func, "value", None))
        args = [self.evaluate(a) for a in node.args]
        keywords = [changed(k, value=self.evaluate(k.value)) for k in node.keywords]
        function = func if is_seen else self.evaluate(func)
        call = changed(node, func=function, args=args, keywords=keywords)
        value = None if self._quiet else self._follow(call, func)
        if value is not None:
            return value
        effect = effect_of(call, self.makers) or Effect("call", call.func)
        if last_part(func) == "eval" and any(map(_is_batchnorm, self._path)):
            effect = Effect("freeze", call.func)
        if effect.kind == "native":
            self._native(call, effect)
        elif effect.kind == "clear" and is_gradient(effect.receiver):
            self._emit(Effect("clear", self._whose(effect.receiver)), call)
        else:
            self._emit(effect, call)
        return call

    def _whose(self, gradient: ast.expr | None) -> ast.expr:
        """Return whose gradient it is: `model` for `for p in model.parameters(): p.grad = None`."""
        while isinstance(gradient, ast.Attribute) and gradient.attr in {"grad", "data"}:
            gradient = gradient.value
        owner = self.evaluate(gradient or _NOTHING)
        symbol = self.symbols.get(getattr(owner, "id", ""))
        over = symbol.loop.iterable if symbol is not None and symbol.kind == "target" else None
        is_model = is_call(over, "parameters") and isinstance(over.func, ast.Attribute)
        return over.func.value if is_model else owner  # type: ignore[union-attr]

    def _native(self, call: ast.Call, effect: Effect) -> None:
        self._emit(Effect("backward", None, effect.argument, "native"), call)
        path = self._path
        condition = keyword(call, "update_grad") or keyword(call, "need_update")
        if condition is not None:
            self._path = (*path, Condition(condition, True))
        self._emit(Effect("step", call.args[1], detail="native"), call)
        self._path = path

    def _emit(self, effect: Effect, node: ast.AST) -> None:
        if not self._quiet:
            event = Event(
                **vars(effect),
                node=node,
                path=self._path,
                order=len(self.events),
                root=len(self.roots) - 1,
            )
            self.events.append(event)

    def makers(self, expr: ast.AST | None) -> list[tuple[str, int | None]]:
        """Return the constructors that may have made an object, each with its index in a tuple."""
        calls = self.made_by(expr)
        return [(_MARK.sub("", dotted(c.func) or last_part(c.func)), index) for c, index in calls]

    def made_by(self, expr: ast.AST | None) -> list[tuple[ast.Call, int | None]]:
        """Return the calls that may have made an object, each with its index in a tuple."""
        made: list[tuple[ast.Call, int | None]] = []
        todo: list[tuple[ast.AST | None, int | None]] = [(expr, None)]
        for _ in range(20):
            if not todo:
                break
            part, index = todo.pop()
            if isinstance(part, ast.Name) and part.id in self.symbols:
                todo.append((self.symbols[part.id].value, index))
            elif isinstance(part, ast.IfExp):
                todo += [(part.orelse, index), (part.body, index)]
            elif isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant):
                at = part.slice.value
                todo.append((part.value, at if isinstance(at, int) else None))
            elif isinstance(part, ast.Call):
                wraps = last_part(part.func) in _WRAPS
                inner = part.args[index or 0 : (index or 0) + 1] if wraps else []
                if wraps and not inner and isinstance(part.func, ast.Attribute):
                    inner = [part.func.value]
                made.append((part, None if inner else index))
                todo += [(argument, None) for argument in inner]
        return made

    # -- helpers -----------------------------------------------------------------------------

    def _follow(self, call: ast.Call, func: ast.expr) -> ast.expr | None:
        """Read a local function, method or `forward` in place of its call; None if it is none."""
        frame, name = self._frame, dotted(call.func) or ""
        helper: FunctionNode | None = None
        if name.startswith("self.") and name.count(".") == 1 and frame.owner is not None:
            helper = frame.owner.methods.get(name[5:])
            if helper is not None:
                return self._inline(call, helper, frame.owner, None)
        elif name == "self" and frame.owner is not None:
            helper = frame.owner.methods.get("forward")
            return self._inline(call, helper, frame.owner, None) if helper else None
        elif isinstance(call.func, ast.Name):
            helper = frame.functions.get(name)
            if helper is not None:
                return self._inline(call, helper, None, None)
        method = ""
        owner = call.func
        if isinstance(call.func, ast.Attribute):
            owner, method = call.func.value, call.func.attr
        for made, _ in self.made_by(owner) if self.index.classes else ():
            of = self.index.classes.get(last_part(made.func))
            if of is not None and isinstance(made.func, ast.Name):
                names = [method] if method else ["forward", "__call__"]
                helper = next((of.methods[n] for n in names if n in of.methods), None)
                if helper is not None:
                    return self._inline(call, helper, of, made)
        return None

    def _inline(
        self, call: ast.Call, helper: FunctionNode, owner: ClassIndex | None, made: ast.Call | None
    ) -> ast.expr | None:
        """Read a helper as if it stood here; return its value, or None if it is left alone."""
        if helper in self._reading or self._frame.depth >= _MAX_DEPTH:
            return None
        if self._inlines >= _MAX_INLINES or not self._is_worth(helper, owner, made):
            return None
        self._inlines += 1
        self.covered.add(helper)
        frame, env, kept = self._frame, self._env, self.globals
        if frame.function is None:
            self.globals = env
        nested = helper in self.closures
        inner = dict(env if nested else self.globals)
        if made is not None and owner is not None:
            inner.update(self.class_names(owner, made))
        elif owner is not None:
            inner.update((n, v) for n, v in env.items() if n.startswith("self."))
        for name in parameters(helper):
            inner.pop(name, None)
        inner.update(_bound(call, helper))
        self._env = inner
        functions = frame.functions if nested or owner else self.index.functions
        holder = owner if owner is not None else frame.owner if nested else None
        self._frame = Frame(
            helper, ChainMap({}, functions), holder, frame.depth + 1, len(self._path)
        )
        self._reading.append(helper)
        self._block(helper.body)
        self._reading.pop()
        value = _returned(self._frame.returns)
        after = self._env
        self._frame, self._env, self.globals = frame, env, kept
        if owner is not None and made is None:  # What a method sets on self, its caller sees too.
            env.update((n, v) for n, v in after.items() if n.startswith("self."))
        return value

    def _is_worth(
        self, helper: FunctionNode, owner: ClassIndex | None, made: ast.Call | None
    ) -> bool:
        """True if a helper trains, is tiny, or may compute a loss."""
        known = self._worth.get(helper)
        if known is None:
            known = self._worth[helper] = self._measure(helper, owner, made)
        return known and (
            helper in self.index.relevant
            or len(helper.body) <= 2
            or any(isinstance(item, Loop) for item in self._path)
        )

    def _measure(
        self, helper: FunctionNode, owner: ClassIndex | None, made: ast.Call | None
    ) -> bool:
        nodes = list(ast.walk(helper))
        if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in nodes):
            return False
        if helper in self.index.relevant:
            return True
        lines = (helper.end_lineno or 0) - helper.lineno
        named = [helper.name, owner.node.name if owner and made else ""]
        of_loss = any(map(_LOSS.search, named)) or helper.name in {"step", "forward_step"}
        if made is not None and not of_loss and len(helper.body) > 3:
            # A network: its `forward` matters if it returns a loss.
            returned = [n for n in nodes if isinstance(n, ast.Return)]
            of_loss = any(_LOSS.search(name) for r in returned for name in names_in(r))
            return of_loss and lines <= 3 * _MAX_LINES
        return lines <= (3 * _MAX_LINES if of_loss else _MAX_LINES)


def is_simple(expr: ast.AST, budget: int = _MAX_SIMPLE) -> bool:
    """True if an expression can replace the name it was assigned to."""
    return _simple_size(expr, budget) <= budget


def _simple_size(expr: ast.AST, budget: int) -> int:
    """Return the number of parts of a simple expression, or a number above the budget."""
    if isinstance(expr, (ast.Name, ast.Constant)):
        return 1
    if isinstance(expr, ast.Attribute):
        return 1 + _simple_size(expr.value, budget)
    if isinstance(expr, ast.Subscript) and isinstance(expr.slice, ast.Constant):
        return 1 + _simple_size(expr.value, budget)
    parts: list[ast.expr]
    if isinstance(expr, ast.Call):
        func = expr.func
        is_get = isinstance(func, ast.Attribute) and func.attr == "get"
        constants = all(isinstance(a, ast.Constant) for a in expr.args)
        if expr.keywords or not (dotted(func) in _PURE_CALLS or (is_get and constants)):
            return budget + 1
        parts = [*expr.args, func]
    elif isinstance(expr, _OPERATIONS):
        parts = [n for n in ast.iter_child_nodes(expr) if isinstance(n, ast.expr)]
    else:
        return budget + 1
    size = 1
    for part in parts:
        size += _simple_size(part, budget)
        if size > budget:
            break
    return size


def choice(test: ast.expr, yes: ast.expr, no: ast.expr) -> ast.expr:
    """Return `yes if test else no`, as a plain condition where it is one."""
    if text(yes) == text(no):
        return yes
    truths = [part.value if isinstance(part, ast.Constant) else None for part in (yes, no)]
    made: ast.expr
    if truths[0] is True and truths[1] is False:
        return test
    if truths[0] is False and truths[1] is True:
        made = ast.UnaryOp(ast.Not(), test)
    elif truths[0] is True:
        made = ast.BoolOp(ast.Or(), [test, no])
    elif truths[1] is False:
        made = ast.BoolOp(ast.And(), [test, yes])
    else:
        made = ast.IfExp(test, yes, no)
    return ast.copy_location(made, yes)


def _returned(returns: list[tuple[list[Condition], ast.expr]]) -> ast.expr:
    """Return the value of a helper: of several returns, each under its conditions."""
    if not returns:
        return _NOTHING
    value = returns[-1][1]
    for conditions, earlier in reversed(returns[:-1]):
        tests = [c.test if c.positive else ast.UnaryOp(ast.Not(), c.test) for c in conditions]
        test = tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)
        value = choice(test if tests else ast.Constant(value=True), earlier, value)
    return value


def _is_scaled(value: ast.expr) -> bool:
    """True for `p.grad / k`: a gradient times or over something."""
    return isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Mult, ast.Div))


def _is_batchnorm(item: PathItem) -> bool:
    """True for a condition about BatchNorm: `isinstance(layer, nn.BatchNorm2d)`."""
    return isinstance(item, Condition) and "BatchNorm" in text(item.test)


def _bound(call: ast.Call, helper: FunctionNode) -> Env:
    """Return what a call hands to each parameter of a function, or its default."""
    spec = helper.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
    if names and names[0] in {"self", "cls"}:
        names = names[1:]
    bound: Env = dict(zip(names[::-1], spec.defaults[::-1], strict=False))
    options = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    bound.update((a.arg, d) for a, d in options if d is not None)
    if not any(isinstance(a, ast.Starred) for a in call.args):
        bound.update(zip(names, call.args, strict=False))
    bound.update((k.arg, k.value) for k in call.keywords if k.arg is not None)
    return bound
