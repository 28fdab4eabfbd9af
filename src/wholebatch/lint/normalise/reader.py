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

from .call_kinds import effect_of, is_gradient
from .events import Condition, Context, Effect, Event, Loop, PathItem, Symbol
from .file_index import ClassIndex, FileIndex, parameters
from .syntax import (
    FUNCTIONS,
    FunctionNode,
    assigned_names,
    changed,
    dotted,
    is_binary,
    is_call,
    keyword,
    last_part,
    target_names,
    text,
)

Env = dict[str, ast.expr]
_MAX_DEPTH = 6
_MAX_INLINES = 250
_MAX_LINES = 120
_MAX_SIMPLE = 40
_PURE_CALLS = {"int", "float", "max", "min", "len", "bool", "abs", "round", "range"}
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp)
# Calls that give back a model that they wrap or move.
_WRAPS = {
    "compile", "DistributedDataParallel", "DDP", "DataParallel", "FSDP", "to", "cuda", "train",
    "eval", "float", "double", "half", "bfloat16", "prepare", "prepare_model", "setup", "cpu",
    "FullyShardedDataParallel", "requires_grad_",
}  # fmt: skip
_OF_GRADIENTS = {"zero_", "mul_", "div_", "detach_", "norm", "requires_grad_"}
_LEAVES: dict[type[ast.stmt], str] = {ast.Continue: "skip", ast.Break: "break", ast.Return: "break"}
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
    returns: list[tuple[list[Condition], ast.expr]] = field(default_factory=list)


class Reader:
    """Reads the functions of one file; its events, loops and symbols are the normal form."""

    def __init__(self, index: FileIndex) -> None:
        self.index = index
        self.events: list[Event] = []
        self.loops: list[Loop] = []
        self.symbols: dict[str, Symbol] = {}
        self.roots: list[ClassIndex | None] = [None]  # The class of each function that was read.
        self.covered: set[FunctionNode] = set()
        self._globals: Env = {}
        self._env: Env = {}
        self._path: tuple[PathItem, ...] = ()
        self._frame = Frame(None, ChainMap(index.functions))
        self._quiet = False
        self._inlines = 0
        self._reading: list[FunctionNode] = []

    # -- entry points ------------------------------------------------------------------------

    def read_module(self) -> None:
        """Read what the module itself runs; its functions rely on names set outside of loops."""
        self._block(self.index.tree.body)
        changing = {name for name, symbol in self.symbols.items() if symbol.loops}
        self._globals = {
            name: value
            for name, value in self._env.items()
            if changing.isdisjoint(n.id for n in ast.walk(value) if isinstance(n, ast.Name))
        }

    def read_root(self, function: FunctionNode, owner: ClassIndex | None, *, as_loop: bool) -> None:
        """Read a function that no other that is read calls; `as_loop` if its loop is elsewhere."""
        self.roots.append(owner)
        self.covered.add(function)
        self._frame = Frame(function, ChainMap({}, self.index.functions), owner, 1)
        names = parameters(function)
        self._env = dict(self._globals)
        if owner is not None:
            self._env.update(self._attributes_of(owner))
        for name in names:
            self._env.pop(name, None)
        if as_loop:
            loop = Loop(function, len(self.loops), (), function)
            self._path = (loop,)
            self._enter(loop, function.body)
            # Lightning counts the batches of an epoch from 0; of another index, nobody knows.
            index = names[2:3] if function.name == "training_step" else []
            for name in (n for n in names if n not in {"self", "cls"}):
                kind = "target" if name in {"batch_idx", *index} else "carried"
                self._env[name] = self._symbol(name, kind, (loop,))
            self._block(function.body)
            loop.after = self._env
        else:
            self._block(function.body)
        self._path = ()

    def _attributes_of(self, owner: ClassIndex, call: ast.Call | None = None) -> Env:
        """Return the attributes of an instance as its methods see them, `self.x`."""
        names = dict(self._globals)
        init = owner.methods.get("__init__")
        if init is not None:
            for name in parameters(init):
                names.pop(name, None)
            names.update(_bound(call, init) if call is not None else {})
        kept, self._env, self._quiet = self._env, names, True
        attributes = {
            name: self._stored(name, self.evaluate(value))
            for name, value in owner.attributes.items()
        }
        self._env, self._quiet = kept, False
        return attributes

    # -- statements --------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt]) -> None:
        """Read statements in order; what follows `if done: continue` is in its `else`."""
        for at, stmt in enumerate(body):
            if isinstance(stmt, ast.If):
                if _leaves(stmt.body) or _leaves(stmt.orelse):
                    self._if(stmt, body[at + 1 :])
                    return
                self._if(stmt, ())
            else:
                self._statement(stmt)

    def _statement(self, stmt: ast.stmt) -> None:
        if isinstance(stmt, ast.Expr):
            self._expression(stmt.value)
        elif isinstance(stmt, ast.Assign):
            value = self.evaluate(stmt.value)
            for target in stmt.targets:
                self._assign(target, value)
        elif isinstance(stmt, ast.AugAssign):
            self._augment(stmt)
        elif isinstance(stmt, (ast.For, ast.AsyncFor, ast.While)):
            self._loop(stmt)
        elif isinstance(stmt, (ast.With, ast.AsyncWith)):
            path = self._path
            for item in stmt.items:
                value = self.evaluate(item.context_expr)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, value)
                self._path = (*self._path, Context(value))
            self._block(stmt.body)
            self._path = path
        elif isinstance(stmt, ast.Return) and stmt.value is not None:
            value = self.evaluate(stmt.value)
            inside = self._path[self._frame.base :]
            conditions = [item for item in inside if isinstance(item, Condition)]
            self._frame.returns.append((conditions, value))
        elif isinstance(stmt, ast.AnnAssign) and stmt.value is not None:
            self._assign(stmt.target, self.evaluate(stmt.value))
        elif isinstance(stmt, FUNCTIONS):
            self._frame.functions[stmt.name] = stmt
        elif isinstance(stmt, ast.Try):
            self._block(stmt.body)
            path, env = self._path, self._env
            self._path = (*path, Condition(ast.Constant(value="except"), True, "except"))
            for handler in stmt.handlers:
                self._env = dict(env)
                self._block(handler.body)
            self._path, self._env = path, env
            self._block([*stmt.orelse, *stmt.finalbody])

    def _expression(self, expr: ast.expr) -> None:
        value = self.evaluate(expr)
        if is_call(expr, "mul_", "div_") and isinstance(expr.func, ast.Attribute) and expr.args:
            name = dotted(expr.func.value)
            if name in self._env and isinstance(value, ast.Call):
                op = ast.Mult() if expr.func.attr == "mul_" else ast.Div()
                scaled = ast.BinOp(self._env[name], op, value.args[0])
                self._env[name] = self._stored(name, ast.copy_location(scaled, expr))

    def _augment(self, stmt: ast.AugAssign) -> None:
        if is_gradient(stmt.target):
            kind = "rescale" if isinstance(stmt.op, (ast.Mult, ast.Div)) else "by_hand"
            self._emit(Effect(kind, argument=self.evaluate(stmt.value)), stmt)
            return
        value = ast.copy_location(ast.BinOp(stmt.target, stmt.op, stmt.value), stmt)
        self._assign(stmt.target, self.evaluate(value))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for at, element in enumerate(target.elts):
                self._assign(element, self._select(value, at))
            return
        if is_gradient(target):
            by = value.right if is_binary(value, ast.Mult, ast.Div) else None
            kind = "clear" if isinstance(value, ast.Constant) else "rescale" if by else "by_hand"
            self._emit(Effect(kind, argument=by), target)
            return
        name = dotted(target)
        if name is not None:
            self._env[name] = self._stored(name, value)

    def _stored(self, name: str, value: ast.expr) -> ast.expr:
        """Return what stands for a name from now on: a simple value itself, or a symbol."""
        if _simple_size(value, _MAX_SIMPLE) <= _MAX_SIMPLE:
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

    def _if(self, stmt: ast.If, rest: Sequence[ast.stmt]) -> None:
        """Read both branches, each followed by the rest of the block unless it leaves the block."""
        test = self.evaluate(stmt.test)
        before, path = self._env, self._path
        ends: list[Env] = []
        leaves = [_leaves(stmt.body), _leaves(stmt.orelse)]
        for body, other, left, positive in (
            (stmt.body, leaves[1], leaves[0], True),
            (stmt.orelse, leaves[0], leaves[1], False),
        ):
            origin = "if" if other is None or left else _LEAVES.get(other, "")
            condition = (Condition(test, positive, origin),) if origin else ()
            self._env, self._path = dict(before), (*path, *condition)
            self._block([*body, *(() if left else rest)])
            if not left:
                ends.append(self._env)
        self._path = path
        self._env = yes = ends[0] if ends else before
        for no in ends[1:]:
            for name in {name for name, _ in yes.items() ^ no.items()}:
                pair = yes.get(name), no.get(name)
                if pair[0] is None or pair[1] is None:
                    yes[name] = pair[0] or pair[1]  # type: ignore[assignment]
                elif text(pair[0]) != text(pair[1]):
                    yes[name] = self._stored(name, choice(test, *pair))  # type: ignore[arg-type]

    def _loop(self, stmt: ast.For | ast.AsyncFor | ast.While) -> None:
        path, before = self._path, dict(self._env)
        parents = tuple(item for item in path if isinstance(item, Loop))
        loop = Loop(stmt, len(self.loops), parents, self._frame.function)
        if isinstance(stmt, ast.While):
            self._path = (*path, loop)
            entered = self._enter(loop, [stmt])
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
        owner = self._frame.owner
        if owner is not None:  # Its other methods may be called here.
            names |= owner.changed
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
        if isinstance(expr, (ast.Constant, ast.Lambda)):
            return expr
        if isinstance(expr, ast.Name):
            return self._env.get(expr.id, expr)
        if isinstance(expr, ast.Attribute):
            name = dotted(expr)
            if expr.attr == "grad":
                self._emit(Effect("by_hand"), expr)
            elif name is not None and name in self._env:
                return self._env[name]
            owner = self.evaluate(expr.value)
            symbol = self.symbols.get(getattr(owner, "id", ""))
            made_as = None if symbol is None else symbol.value
            option = keyword(made_as, expr.attr)  # `Namespace(accum=4).accum`
            if option is not None:
                return option
            return expr if owner is expr.value else changed(expr, value=owner)
        if isinstance(expr, ast.Call):
            return self._call(expr)
        if isinstance(expr, ast.Subscript):
            owner, index = self.evaluate(expr.value), self.evaluate(expr.slice)
            if isinstance(index, ast.Constant):
                return self._select(owner, index.value, expr)
            return changed(expr, value=owner, slice=index)
        if isinstance(expr, ast.Compare) and is_gradient(expr.left):  # `p.grad is not None`
            return expr
        if isinstance(expr, (ast.IfExp, ast.BoolOp)):
            return self._branches(expr)
        if isinstance(expr, ast.NamedExpr):
            self._assign(expr.target, self.evaluate(expr.value))
            return self._env[expr.target.id]
        generic = self._generic(expr)
        if isinstance(expr, (ast.ListComp, ast.GeneratorExp)):
            generators = [changed(g, iter=self.evaluate(g.iter)) for g in expr.generators]
            return changed(generic, generators=generators)
        return generic

    def _generic(self, expr: ast.expr) -> ast.expr:
        fields: dict[str, object] = {}
        for name in expr._fields:
            value = getattr(expr, name, None)
            if isinstance(value, ast.expr):
                fields[name] = self.evaluate(value)
            elif isinstance(value, list):
                fields[name] = [self.evaluate(v) if isinstance(v, ast.expr) else v for v in value]
        return changed(expr, **fields)

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
        value = None if self._quiet else self._follow(call)
        if value is not None:
            return value
        self._emit(effect_of(call, self.makers) or Effect("call", call.func), call)
        return call

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
        calls = self._origins(expr)
        return [(_MARK.sub("", dotted(c.func) or last_part(c.func)), index) for c, index in calls]

    def made_by(self, expr: ast.AST | None) -> list[ast.Call]:
        """Return the calls that may have made an object."""
        return [call for call, _ in self._origins(expr)]

    def _origins(self, expr: ast.AST | None) -> list[tuple[ast.Call, int | None]]:
        """Return the calls that may have made an object, each with its index in a tuple."""
        calls: list[tuple[ast.Call, int | None]] = []
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
                calls.append((part, None if inner else index))
                todo += [(argument, None) for argument in inner]
        return calls

    # -- helpers -----------------------------------------------------------------------------

    def _follow(self, call: ast.Call) -> ast.expr | None:
        """Read a local function, method or `forward` in place of its call; None if it is none."""
        frame, name = self._frame, dotted(call.func) or ""
        head, _, method = name.rpartition(".")
        if frame.owner is not None and (head or method) == "self":
            helper = frame.owner.methods.get(method if head else "forward")
            return self._inline(call, helper, frame.owner, None)
        if name in frame.functions:
            return self._inline(call, frame.functions[name], None, None)
        attribute = call.func if isinstance(call.func, ast.Attribute) else None
        for maker in self.made_by(attribute.value if attribute else call.func):
            of = self.index.classes.get(dotted(maker.func) or "")
            if of is not None:
                helper = of.methods.get(attribute.attr if attribute else "forward")
                return self._inline(call, helper, of, maker)
        return None

    def _inline(
        self,
        call: ast.Call,
        helper: FunctionNode | None,
        owner: ClassIndex | None,
        maker: ast.Call | None,
    ) -> ast.expr | None:
        """Read a helper as if it stood here; return its value, or None if it is left alone."""
        frame = self._frame
        if helper is None or helper in self._reading or frame.depth >= _MAX_DEPTH:
            return None
        if self._inlines >= _MAX_INLINES or not self._is_worth(helper):
            return None
        self._inlines += 1
        self.covered.add(helper)
        env, kept = self._env, self._globals
        if frame.function is None:
            self._globals = env
        is_nested = owner is None and self.index.functions.get(helper.name) is not helper
        inner = dict(env if is_nested else self._globals)
        if maker is not None and owner is not None:
            inner.update(self._attributes_of(owner, maker))
        elif owner is not None:
            inner.update((n, v) for n, v in env.items() if n.startswith("self."))
        for name in parameters(helper):
            inner.pop(name, None)
        inner.update(_bound(call, helper))
        self._env = inner
        functions = frame.functions if is_nested else self.index.functions
        holder = frame.owner if is_nested else owner
        local = ChainMap({}, functions)
        self._frame = Frame(helper, local, holder, frame.depth + 1, len(self._path))
        self._reading.append(helper)
        self._block(helper.body)
        self._reading.pop()
        value = _returned(self._frame.returns)
        after = self._env
        self._frame, self._env, self._globals = frame, env, kept
        if owner is not None and maker is None:  # What a method sets on self, its caller sees too.
            env.update((n, v) for n, v in after.items() if n.startswith("self."))
        return value

    def _is_worth(self, helper: FunctionNode) -> bool:
        """True if a helper trains, or is short and called in a loop: it may compute a loss."""
        if helper not in self.index.relevant:
            is_inside = any(isinstance(item, Loop) for item in self._path)
            lines = (helper.end_lineno or 0) - helper.lineno
            if lines > _MAX_LINES or not (is_inside or len(helper.body) <= 2):
                return False
        return not any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(helper))


def _leaves(body: Sequence[ast.stmt]) -> type[ast.stmt] | None:
    """Return the kind of statement with which a block is left on every path, or None."""
    last = body[-1] if body else None
    if isinstance(last, ast.If) and _leaves(last.body):
        return _leaves(last.orelse)
    leaves = isinstance(last, (*_LEAVES, ast.Raise))
    return type(last) if leaves and last is not None else None


def _simple_size(expr: ast.AST, budget: int) -> int:
    """Return the number of parts of an expression that can replace its name, or over the budget."""
    if isinstance(expr, (ast.Name, ast.Constant)):
        return 1
    if isinstance(expr, ast.Attribute):
        return 1 + _simple_size(expr.value, budget)
    if isinstance(expr, ast.Subscript) and isinstance(expr.slice, ast.Constant):
        return 1 + _simple_size(expr.value, budget)
    if isinstance(expr, ast.Call) and (dotted(expr.func) not in _PURE_CALLS or expr.keywords):
        return budget + 1
    if not isinstance(expr, (ast.Call, *_OPERATIONS)):
        return budget + 1
    size = 1
    for part in ast.iter_child_nodes(expr):
        size += _simple_size(part, budget) if isinstance(part, ast.expr) else 0
        if size > budget:
            break
    return size


def choice(test: ast.expr, yes: ast.expr, no: ast.expr) -> ast.expr:
    """Return `yes if test else no`, as a plain condition where it is one."""
    if text(yes) == text(no):
        return yes
    truths = [part.value if isinstance(part, ast.Constant) else None for part in (yes, no)]
    value: ast.expr
    if truths[0] is True and truths[1] is False:
        return test
    if truths[0] is False and truths[1] is True:
        value = ast.UnaryOp(ast.Not(), test)
    elif truths[0] is True:
        value = ast.BoolOp(ast.Or(), [test, no])
    elif truths[1] is False:
        value = ast.BoolOp(ast.And(), [test, yes])
    else:
        value = ast.IfExp(test, yes, no)
    return ast.copy_location(value, yes)


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
