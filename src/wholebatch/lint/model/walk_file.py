"""The walk of a file: every function with training calls, from those that nothing here calls."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterator
from itertools import chain

from .events import Definition, Env, Loop
from .expressions import FunctionNode, assigned_names, last_part
from .file_facts import Facts, class_env, flat_env
from .function_walk import Scope, Walker
from .name_resolution import Resolver

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BACKWARD = {"backward", "manual_backward", "training_step"}
_COUNTED_BY_FRAMEWORK = {"batch_idx", "batch_index", "batch_nb"}


def walk_file(tree: ast.Module, facts: Facts) -> Walker:
    """Walk every function of a file that contains training calls, once."""
    walker = Walker(Resolver(), facts)
    env = Env()
    relevant = frozenset(facts.relevant)
    if not relevant and not facts.called & {"loss_scaler", *_BACKWARD}:
        return walker
    walker.block(tree.body, env, (), Scope(ChainMap({}, facts.functions), relevant=relevant))
    # Functions can rely on the module's names that are set once, outside loops.
    settled = Env({n: d for n, d in env.items() if len(d) == 1 and not d[0].loops})
    roots = [
        (function, settled, Scope(ChainMap({}, facts.functions), relevant=relevant))
        for function in facts.functions.values()
    ]
    for owner in facts.classes:
        inner = class_env(owner, settled)
        for method in owner.methods.values():
            scope = Scope(
                ChainMap({}, facts.functions), dict(owner.methods), owner.changed, relevant
            )
            roots.append((method, inner, scope))
    # A function that the file calls is followed from its caller: begin with the others.
    called = {*facts.called, "__init__"}
    uncalled = [root for root in roots if root[0].name not in called]
    for function, names, scope in chain(uncalled, roots, _closures(facts, settled)):
        if function not in walker.covered and function in relevant:
            _walk_root(walker, function, names, scope)
    return walker


def _closures(facts: Facts, env: Env) -> Iterator[tuple[FunctionNode, Env, Scope]]:
    """Yield the functions inside functions, which a framework may be handed: `Engine(update)`."""
    for function in sorted(facts.relevant, key=lambda f: f.lineno):
        around = facts.functions_around(function.lineno)
        if len(around) > 1:
            own = assigned_names(function.body)
            outer = flat_env(n for f in around[:-1] for n in ast.walk(f))
            inner = Env({**env, **{n: d for n, d in outer.items() if n not in own}})
            scope = Scope(ChainMap({}, facts.functions), relevant=frozenset(facts.relevant))
            yield function, inner, scope


def _walk_root(walker: Walker, function: FunctionNode, env: Env, scope: Scope) -> None:
    walker.covered.add(function)
    walker.roots.append(function)
    spec = function.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    inner = Env({n: d for n, d in env.items() if n not in names})
    if not _steps_outside_loops(function, walker, scope):
        walker.block(function.body, inner, (), scope)
        return
    loop = Loop(function, inner.frozen(), ())
    walker.enter(loop, inner, function.body, scope)
    for name in names:
        if name in {"self", "cls"}:
            continue
        kind = "target" if name in _COUNTED_BY_FRAMEWORK else "carried"
        symbol = walker.resolver.new_symbol(name, (loop,), kind, loop)
        inner.bind(name, (Definition(symbol, Env(), (loop,)),))
    walker.block(function.body, inner, (loop,), scope)
    loop.exit = inner.frozen()


def _steps_outside_loops(
    function: FunctionNode, walker: Walker, scope: Scope, around: tuple[FunctionNode, ...] = ()
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
        if isinstance(node, (ast.While, ast.ClassDef, ast.Lambda, *_FUNCTIONS)):
            continue
        if isinstance(node, ast.Call):
            if last_part(node.func) in _BACKWARD:
                return True
            helper = walker.helper(node, scope)
            new = helper in scope.relevant and helper not in (function, *around)
            if new and _steps_outside_loops(helper, walker, scope, (*around, function)):  # type: ignore[arg-type]
                return True
        todo += ast.iter_child_nodes(node)
    return False
