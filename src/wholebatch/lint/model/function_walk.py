"""The walk of a function from top to bottom: it records events and follows local helpers."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from .call_kinds import HOLDS_SYNC, classify, holds_sync, rescales_gradient
from .events import Context, Definition, Effect, Env, Event, Guard, Loop, PathItem
from .expressions import (
    FunctionNode,
    assigned_names,
    bind_pairs,
    calls_in,
    dotted,
    keyword,
    last_part,
    names_in,
    target_names,
    text,
    without_marks,
)
from .file_facts import Facts, methods_called
from .name_resolution import Resolver

_LoopNode = ast.For | ast.AsyncFor | ast.While
_Path = tuple[PathItem, ...]

_MAX_INLINE_DEPTH = 6
_MAX_INLINES = 250
_MAX_INLINED_LINES = 120
_MAX_ALTERNATIVES = 4
_EMPTY = Env()
_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))  # `except*` is new in Python 3.11.
# Helpers that log: what they are handed is logged, whatever they do with it.
_LOGS = ("log", "print", "report")


@dataclass
class Scope:
    """The functions and methods that can be called by name here."""

    # Functions of the file, under those that are defined inside the function that is walked.
    functions: ChainMap[str, FunctionNode]
    methods: dict[str, FunctionNode] = field(default_factory=dict)
    # Attributes of self that each method changes: counters kept between calls.
    changed: dict[str, frozenset[str]] = field(default_factory=dict)
    # Functions that contain training calls; others are only followed for their return value.
    relevant: frozenset[FunctionNode] = frozenset()

    def changed_by(self, loop: Loop, body: Sequence[ast.AST]) -> set[str]:
        """Return the names that an iteration can change, also through methods that it calls."""
        if not self.changed:
            return assigned_names(body)
        names = self.changed if loop.virtual else set(methods_called(body))
        kept = [self.changed.get(n, frozenset()) for n in names if n not in {"__init__", "setup"}]
        return assigned_names(body).union(*kept)


@dataclass
class _Exit:
    """A way out of a block before its end: its kind and its condition."""

    kind: str
    conditions: tuple[tuple[ast.expr, Env, bool], ...]


class Walker:
    """Collects the events of one file."""

    def __init__(self, resolver: Resolver, facts: Facts) -> None:
        self.resolver = resolver
        self.facts = facts
        self.events: list[Event] = []
        self.loops: list[Loop] = []
        self.covered: set[FunctionNode] = set()
        self.roots: list[ast.AST] = [facts.module]  # The walk that each event's `root` counts.
        self._inlines = 0
        self._stack: list[FunctionNode] = []
        self._returns: list[list[Definition]] = []
        self._stmt: ast.stmt = ast.Pass()

    # -- blocks ------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], env: Env, path: _Path, scope: Scope) -> list[_Exit]:
        """Walk statements in order; a conditional `continue` guards all that follows it."""
        exits: list[_Exit] = []
        for stmt in body:
            self._stmt = stmt
            for leaving in self._statement(stmt, env, path, scope):
                exits.append(leaving)
                if not leaving.conditions:
                    return exits
                if leaving.kind != "raise":  # An error is no way of waiting.
                    path = (*path, *_negated(leaving, self.resolver))
        return exits

    def _statement(self, stmt: ast.stmt, env: Env, path: _Path, scope: Scope) -> list[_Exit]:
        if isinstance(stmt, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            self._assign(stmt, env, path, scope)
        elif isinstance(stmt, ast.Expr):
            self._calls(stmt.value, env, path, scope)
            scaled = getattr(stmt.value, "func", stmt)
            if isinstance(scaled, ast.Attribute) and scaled.attr in {"mul_", "div_"}:
                self._bind(scaled.value, stmt.value, env, path)
        elif isinstance(stmt, ast.If):
            return self._if(stmt, env, path, scope)
        elif isinstance(stmt, (ast.For, ast.AsyncFor, ast.While)):
            self._loop(stmt, env, path, scope)
        elif isinstance(stmt, (ast.With, ast.AsyncWith)):
            return self._with(stmt, env, path, scope)
        elif isinstance(stmt, _TRY):
            self._try(stmt, env, path, scope)
        elif isinstance(stmt, ast.Match):
            return self.block(_as_ifs(stmt.subject, stmt.cases), env, path, scope)
        elif isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
            scope.functions[stmt.name] = stmt
        elif isinstance(stmt, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            if isinstance(stmt, ast.Return):
                self._return(stmt, env, path, scope)
            return [_Exit(type(stmt).__name__.lower(), ())]
        return []

    def _return(self, stmt: ast.Return, env: Env, path: _Path, scope: Scope) -> None:
        if stmt.value is None:
            return
        self._calls(stmt.value, env, path, scope)
        if self._returns:
            self._returns[-1].append(Definition(stmt.value, env.frozen(), _loops(path), stmt))

    def _if(self, stmt: ast.If, env: Env, path: _Path, scope: Scope) -> list[_Exit]:
        self._calls(stmt.test, env, path, scope)
        before = env.frozen()
        exits: list[_Exit] = []
        ended: list[bool] = []
        results: list[Env] = []
        for body, positive in ((stmt.body, True), (stmt.orelse, False)):
            branch = Env(before)
            guard = Guard(stmt.test, before, positive)
            left = self.block(body, branch, (*path, guard), scope)
            results.append(branch)
            ended.append(any(not e.conditions for e in left))
            for e in left:
                exits.append(_Exit(e.kind, ((stmt.test, before, positive), *e.conditions)))
        if all(ended):
            exits = [_Exit("both", ())] if exits else exits
        alive = [r for r, gone in zip(results, ended, strict=True) if not gone] or results
        _join(env, alive)
        return exits

    def _with(
        self, stmt: ast.With | ast.AsyncWith, env: Env, path: _Path, scope: Scope
    ) -> list[_Exit]:
        for item in stmt.items:
            self._calls(item.context_expr, env, path, scope)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, item.context_expr, env, path)
            context = Context(item.context_expr, env.frozen(), stmt)
            path = (*path, context)
            if holds_sync(context):
                self._emit(Effect("hold_sync"), item.context_expr, stmt, env, path)
        return self.block(stmt.body, env, path, scope)

    def _try(self, stmt: ast.Try, env: Env, path: _Path, scope: Scope) -> None:
        self.block(stmt.body, env, path, scope)
        for handler in stmt.handlers:
            branch = Env(env)
            guard = Guard(ast.Constant(value="except"), env, True, "except")
            self.block(handler.body, branch, (*path, guard), scope)
        self.block(stmt.orelse, env, path, scope)
        self.block(stmt.finalbody, env, path, scope)

    def _loop(self, stmt: _LoopNode, env: Env, path: _Path, scope: Scope) -> None:
        iterable = None if isinstance(stmt, ast.While) else stmt.iter
        target = None if isinstance(stmt, ast.While) else stmt.target
        if iterable is not None:
            self._calls(iterable, env, path, scope)
        loop = Loop(stmt, env.frozen(), _loops(path), target, iterable)
        before = env.frozen()
        tests = [stmt.test] if isinstance(stmt, ast.While) else []
        self.enter(loop, env, [*tests, *stmt.body], scope)
        for test in tests:
            self._calls(test, env, (*path, loop), scope)
        entered = env.frozen()
        self.block(stmt.body, env, (*path, loop), scope)
        loop.exit = env.frozen()
        # An attribute that might have changed, but did not, keeps its definition.
        for name in loop.carried:
            if name in before and env.get(name) is entered.get(name):
                env.bind(name, before[name])
        self.block(stmt.orelse, env, path, scope)

    def enter(self, loop: Loop, env: Env, body: Sequence[ast.AST], scope: Scope) -> None:
        """Give every name that the loop changes a symbol for "its value in this iteration"."""
        self.loops.append(loop)
        around = (*loop.parents, loop)
        loop.carried = scope.changed_by(loop, body)
        # A setting that another method overwrites is unknown, not the literal of `__init__`.
        for name in frozenset().union(*scope.changed.values()) - loop.carried:
            if all(isinstance(d.expr, ast.Constant) and not d.node for d in env.get(name, ())):
                env.bind(name, (Definition(ast.Name(id=name, ctx=ast.Load()), _EMPTY, ()),))
        for name in loop.carried:
            symbol = self.resolver.new_symbol(name, around, "carried", loop, env.get(name, ()))
            env.bind(name, (Definition(symbol, _EMPTY, around),))
        if loop.target is not None:
            for name in target_names(loop.target):
                symbol = self.resolver.new_symbol(name, around, "target", loop)
                env.bind(name, (Definition(symbol, _EMPTY, around),))

    # -- assignments and calls ---------------------------------------------------------------

    def _assign(
        self, stmt: ast.Assign | ast.AnnAssign | ast.AugAssign, env: Env, path: _Path, scope: Scope
    ) -> None:
        if stmt.value is None:
            return
        self._calls(stmt.value, env, path, scope)
        if isinstance(stmt, ast.AugAssign):
            self._emit(Effect("augment", stmt.target, stmt.value), stmt, stmt, env, path)
            is_factor = isinstance(stmt.op, (ast.Mult, ast.Div))
            if is_factor and rescales_gradient(stmt.target, stmt.value):
                self._emit(Effect("rescale", stmt.target, stmt.value), stmt, stmt, env, path)
            value = ast.BinOp(_load(stmt.target), stmt.op, stmt.value)
            ast.copy_location(value, stmt)
            value.augmented = True  # type: ignore[attr-defined]  # a statement in the source
            self._bind(stmt.target, value, env, path)
            return
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        for target in targets:
            name = dotted(target) or ""
            if name.endswith(".grad") and isinstance(stmt.value, ast.Constant):
                self._emit(Effect("clear", target, detail="grad=None"), stmt, stmt, env, path)
            if HOLDS_SYNC.fullmatch(last_part(target)):
                self._emit(Effect("hold_sync", target), stmt, stmt, env, path)
            if isinstance(stmt.value, ast.BinOp) and rescales_gradient(target, stmt.value):
                self._emit(Effect("rescale", target, stmt.value), stmt, stmt, env, path)
            self._bind(target, stmt.value, env, path)
        self._emit(Effect("assign", targets[0], stmt.value), stmt, stmt, env, path)

    def _bind(self, target: ast.expr, value: ast.expr, env: Env, path: _Path) -> None:
        before = env.frozen()
        for name, expr in bind_pairs(target, value):
            if name.endswith("]"):
                env.drop(f"{name}[")
            env.bind(name, (Definition(expr, before, _loops(path), target),))

    def _calls(self, expr: ast.expr, env: Env, path: _Path, scope: Scope) -> None:
        """Record the calls of an expression; `step() if last else None` is a condition too."""
        if isinstance(expr, ast.IfExp):
            self._calls(expr.test, env, path, scope)
            for branch, positive in ((expr.body, True), (expr.orelse, False)):
                guard = Guard(expr.test, env.frozen(), positive)
                self._calls(branch, env, (*path, guard), scope)
            return
        if isinstance(expr, ast.BoolOp):
            for value in expr.values:
                self._calls(value, env, path, scope)
                path = (*path, Guard(value, env.frozen(), isinstance(expr.op, ast.And)))
            return
        for call in calls_in(expr):
            if isinstance(call, ast.NamedExpr):
                self._bind(call.target, call.value, env, path)
                continue
            helper = self.helper(call, scope)
            if helper is not None and any(word in helper.name for word in _LOGS):
                self._emit(Effect("call", call.func), call, self._stmt, env, path)
            if helper is not None and self._inline(call, helper, env, path, scope):
                continue
            effect = classify(call, env)
            if last_part(call.func) == "eval" and any(map(_is_batchnorm, path)):
                effect = Effect("freeze", call.func)
            if effect is None:
                self._emit(Effect("call", call.func), call, self._stmt, env, path)
            elif effect.kind == "native":
                self._native(call, effect, env, path)
            else:
                self._emit(effect, call, self._stmt, env, path)

    def _native(self, call: ast.Call, effect: Effect, env: Env, path: _Path) -> None:
        self._emit(Effect("backward", None, effect.argument, "native"), call, self._stmt, env, path)
        condition = keyword(call, "update_grad") or keyword(call, "need_update")
        if condition is not None:
            path = (*path, Guard(condition, env.frozen(), True))
        self._emit(Effect("step", call.args[1], detail="native"), call, self._stmt, env, path)

    def _emit(self, effect: Effect, node: ast.AST, stmt: ast.stmt, env: Env, path: _Path) -> None:
        # Before the first loop nothing is logged that a loop has computed.
        if effect.kind in {"call", "assign", "augment"} and not _loops(path) and not self.loops:
            return
        spelled = ""
        if effect.receiver is not None and effect.kind not in {"call", "assign", "augment"}:
            spelled = without_marks(text(self.resolver.resolve(effect.receiver, env)))
        event = Event(
            **vars(effect),
            node=node,
            stmt=stmt,
            path=path,
            env=env.frozen(),
            order=len(self.events),
            root=len(self.roots) - 1,
            receiver_text=spelled,
        )
        self.events.append(event)

    # -- helpers -----------------------------------------------------------------------------

    def helper(self, call: ast.Call, scope: Scope) -> FunctionNode | None:
        """Return the function or method of this file that a call runs, or None."""
        name = dotted(call.func) or ""
        if name.startswith("self.") and name.count(".") == 1:
            return scope.methods.get(name[5:])
        return scope.functions.get(name)

    def _worth(self, helper: FunctionNode, path: _Path, scope: Scope) -> bool:
        """True if a helper should be inlined: relevant, tiny, or short and inside a loop."""
        if helper in scope.relevant:
            return True
        if len(helper.body) <= 2:
            return True
        of_loss = any(word in helper.name for word in ("loss", "forward", "step"))
        limit = 3 * _MAX_INLINED_LINES if of_loss else _MAX_INLINED_LINES
        return bool(_loops(path)) and (helper.end_lineno or 0) - helper.lineno <= limit

    def _inline(
        self, call: ast.Call, helper: FunctionNode, env: Env, path: _Path, scope: Scope
    ) -> bool:
        if (
            helper in self._stack
            or len(self._stack) >= _MAX_INLINE_DEPTH
            or self._inlines >= _MAX_INLINES
            or not self._worth(helper, path, scope)
        ):
            return False
        self._inlines += 1
        self.covered.add(helper)
        is_method = helper.name in scope.methods
        visible = {k: v for k, v in env.items() if not is_method or "." in k}
        bound = arguments(call, helper, env, _loops(path))
        inside = replace(scope, functions=scope.functions.new_child())
        inner = Env({**visible, **bound}, frame=self._inlines)
        caller_stmt = self._stmt
        self._stack.append(helper)
        self._returns.append([])
        self.block(helper.body, inner, path, inside)
        self.resolver.returns[env.frame, id(call)] = self._returns.pop()
        self._stack.pop()
        self._stmt = caller_stmt
        # What a helper sets on self, its caller sees too.
        for name, defs in inner.items():
            if name.startswith("self.") and env.get(name) is not defs:
                env.bind(name, defs)
        return True


def arguments(
    call: ast.Call, helper: FunctionNode, env: Env, loops: tuple[Loop, ...]
) -> dict[str, tuple[Definition, ...]]:
    """Return what a call hands to each parameter of a function, or its default."""
    spec = helper.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
    bound: dict[str, tuple[Definition, ...]] = {}
    before = env.frozen()
    if names and names[0] in {"self", "cls"}:
        held = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        bound[names[0]] = (Definition(held, before, loops),)
        names = names[1:]
    defaults = dict(zip(names[::-1], spec.defaults[::-1], strict=False))
    defaults |= {
        a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None
    }
    for name, default in defaults.items():
        bound[name] = (Definition(default, _EMPTY, ()),)
    if not any(isinstance(a, ast.Starred) for a in call.args):
        for name, argument in zip(names, call.args, strict=False):
            bound[name] = (Definition(argument, before, loops, argument),)
    for option in call.keywords:
        if option.arg is not None:
            bound[option.arg] = (Definition(option.value, before, loops, option.value),)
    return bound


def _as_ifs(subject: ast.expr, cases: Sequence[ast.match_case]) -> list[ast.stmt]:
    """Return the arms of a `match` as `if`, `elif` and `else`."""
    if not cases:
        return []
    case, *others = cases
    is_any = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
    if is_any and case.guard is None:
        return case.body
    value: ast.expr = ast.Name(text(case.pattern), ast.Load())
    if isinstance(case.pattern, ast.MatchValue):
        value = case.pattern.value
    test: ast.expr = ast.Compare(subject, [ast.Eq()], [value])
    if case.guard is not None:
        test = case.guard if is_any else ast.BoolOp(ast.And(), [test, case.guard])
    return [ast.copy_location(ast.If(test, case.body, _as_ifs(subject, others)), subject)]


def _is_batchnorm(item: PathItem) -> bool:
    """True for a condition about BatchNorm: `isinstance(layer, nn.BatchNorm2d)`."""
    return isinstance(item, Guard) and any("BatchNorm" in name for name in names_in(item.expr))


def _load(target: ast.expr) -> ast.expr:
    expr = ast.parse(ast.unparse(target), mode="eval").body
    for node in ast.walk(expr):
        ast.copy_location(node, target)  # A finding there then points at the statement.
    return expr


def _loops(path: Iterable[PathItem]) -> tuple[Loop, ...]:
    return tuple(item for item in path if isinstance(item, Loop))


def _negated(leaving: _Exit, resolver: Resolver) -> tuple[Guard, ...]:
    """Return the guard of everything after a conditional `continue`, `break` or `return`."""
    origin = "skip" if leaving.kind == "continue" else "break"
    if len(leaving.conditions) == 1:
        expr, env, positive = leaving.conditions[0]
        return (Guard(expr, env, not positive, origin),)
    parts: list[ast.expr] = []
    for expr, env, positive in leaving.conditions:
        resolved = resolver.resolve(expr, env)
        parts.append(resolved if positive else ast.UnaryOp(ast.Not(), resolved))
    return (Guard(ast.BoolOp(ast.And(), parts), _EMPTY, False, origin),)


def _join(env: Env, results: Sequence[Env]) -> None:
    """Set the names that the branches changed to what they can be after any of these."""
    for name in set().union(*(result.changed for result in results)):
        defs = {id(d): d for result in results for d in result.get(name, ())}
        env.bind(name, tuple(defs.values())[:_MAX_ALTERNATIVES])
