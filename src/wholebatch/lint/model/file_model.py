"""The construction of the model: parse the source, walk every function once, find the windows."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass

from .events import Def, Env, Loop
from .expressions import children, last_part
from .file_facts import ClassFacts, Facts, class_env, gather
from .function_walk import FunctionNode, Scope, Walker
from .loop_windows import Window, find_windows
from .name_resolution import Resolver

__all__ = ["File", "read"]

_BACKWARD = {"backward", "manual_backward"}
_COUNTED_BY_FRAMEWORK = {"batch_idx", "batch_index", "batch_nb"}


@dataclass(eq=False)
class File:
    """A file as the rules see it."""

    tree: ast.Module
    facts: Facts
    windows: list[Window]
    walker: Walker

    @property
    def accumulating(self) -> list[Window]:
        """Return the windows that accumulate the gradients of several micro-batches."""
        return [w for w in self.windows if w.accumulates]


def read(source: str) -> File:
    """Parse and model one file; raise SyntaxError as Python does."""
    with warnings.catch_warnings():
        # Ignore warnings about invalid escapes in the file's strings.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    facts = gather(tree, source)
    walker = Walker(Resolver())
    env = Env()
    relevant = frozenset(facts.relevant)
    if not relevant and not facts.called & {"backward", "loss_scaler", "manual_backward"}:
        return File(tree, facts, [], walker)
    scope = Scope(dict(facts.functions), relevant=relevant)
    walker.block(tree.body, env, (), scope)
    module_env = _settled(tree, env)
    for only_uncalled in (True, False):
        for function in facts.functions.values():
            if function in walker.covered or function not in relevant:
                continue
            if only_uncalled and function.name in facts.called:
                continue
            inner_scope = Scope(dict(facts.functions), relevant=relevant)
            _walk_root(walker, function, module_env, inner_scope)
        for owner in facts.classes:
            _walk_class(walker, facts, owner, module_env, only_uncalled=only_uncalled)
    for nested, seen, inner_scope in walker.nested:
        if nested not in walker.covered and nested in relevant:
            _walk_root(walker, nested, seen, inner_scope)
    return File(tree, facts, find_windows(walker, facts), walker)


def _settled(tree: ast.Module, env: Env) -> Env:
    """Return the module's names that functions can rely on: set once, outside loops."""
    return Env({n: d for n, d in env.items() if len(d) == 1 and not d[0].loops})


def _walk_class(
    walker: Walker, facts: Facts, owner: ClassFacts, env: Env, *, only_uncalled: bool
) -> None:
    inner = class_env(owner, env)
    for name, method in owner.methods.items():
        if method in walker.covered or method not in facts.relevant:
            continue
        if only_uncalled and (name in facts.called or name == "__init__"):
            continue
        scope = Scope(
            dict(facts.functions), dict(owner.methods), owner.changed, frozenset(facts.relevant)
        )
        _walk_root(walker, method, inner, scope)


def _walk_root(walker: Walker, function: FunctionNode, env: Env, scope: Scope) -> None:
    walker.covered.add(function)
    inner = Env(env)
    spec = function.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    inner.replace({n: d for n, d in env.items() if n not in names})
    if not _steps_outside_loops(function):
        walker.block(function.body, inner, (), scope)
        return
    loop = Loop(function, inner.frozen(), ())
    walker.enter(loop, inner, function.body, scope)
    for name in names:
        if name in {"self", "cls"}:
            continue
        kind = "target" if name in _COUNTED_BY_FRAMEWORK else "carried"
        symbol = walker.resolver.new_symbol(name, (loop,), kind, loop)
        inner.bind(name, (Def(symbol, Env(), (loop,)),))
    walker.block(function.body, inner, (loop,), scope)
    loop.exit = inner.frozen()


def _steps_outside_loops(function: FunctionNode) -> bool:
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Call) and last_part(node.func) in _BACKWARD:
            return True
        todo += children(node)
    return False
