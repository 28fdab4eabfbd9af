"""Code that no graph can stand for: hooks, recurrent layers, and functions that Dynamo skips."""

from __future__ import annotations

import builtins
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from wholebatch.compile.execute_mode import CannotTrace

_COMPILED = ("OptimizedModule", "RecursiveScriptModule", "TopLevelTracedModule")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_traceable_hook(hook: Any) -> bool:
    """True for hooks that leave nothing behind in Python.

    They are those that require gradients, and the hooks by which transformers hands the outputs of
    inner layers to its caller.
    """
    return require_gradients(hook) or hook.__module__ == "transformers.utils.output_capturing"


def require_gradients(hook: Any) -> bool:
    """True for `output.requires_grad_(True)`, which PEFT and transformers put on embeddings."""
    code, model = getattr(hook, "__code__", None), _require_grad.__code__
    return code is not None and (code.co_code, code.co_names, code.co_consts[-1:]) == (
        model.co_code,
        model.co_names,
        model.co_consts[-1:],
    )


def _require_grad(module: Any, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def refuse_hooks(model: nn.Module) -> None:
    """Raise CannotTrace for a model with hooks: a graph would run their Python only once.

    Modules made by torch.compile or torch.jit are refused too: their forward is no longer Python.
    So are nn.LSTM, nn.GRU and nn.RNN: cuDNN runs each as one kernel already.
    """
    for name, module in model.named_modules():
        name = name or "the model"
        if type(module).__name__ in _COMPILED:
            raise CannotTrace(f"{name} is an {type(module).__name__}")
        if isinstance(module, nn.RNNBase):
            raise CannotTrace(f"{name} is an nn.{type(module).__name__}, which runs eagerly only")
        for kind in _HOOKS:
            hooks = getattr(module, kind, None) or {}
            if not all(map(_is_traceable_hook, hooks.values())):
                raise CannotTrace(
                    f"{name} has {kind.strip('_').replace('_', ' ')}, which a graph would run only "
                    "once"
                )


def read_by(target: Any) -> str | None:
    """Return the name of a value that a function reads where Dynamo does not look, or None.

    Such functions are marked with `torch.compiler.allow_in_graph`, or are the backward of a custom
    operation. What they read would be a constant of the graph.
    """
    functions = [target] if isinstance(target, types.FunctionType) else _backward_of(target)
    return next((name for function in functions for name in _values_read(function)), None)


def _backward_of(target: Any) -> list[types.FunctionType]:
    """Return the Python functions of a custom operation's backward."""
    from torch._library.custom_ops import OPDEFS

    operation = target.default if isinstance(target, torch._ops.OpOverloadPacket) else target
    if not isinstance(operation, torch._ops.OpOverload):
        return []
    definition = OPDEFS.get(operation._schema.name)
    functions = (getattr(definition, name, None) for name in ("_backward_fn", "_setup_context_fn"))
    return [function for function in functions if isinstance(function, types.FunctionType)]


def _values_read(function: types.FunctionType, depth: int = 4) -> Iterator[str]:
    """Yield the names of globals and free variables that are values, not functions or modules."""
    if depth == 0 or (function.__module__ or "").partition(".")[0] in ("torch", "wholebatch"):
        return
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        held[name] = cell.cell_contents
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            held[name] = function.__globals__[name]
    for name, value in held.items():
        if isinstance(value, types.FunctionType):
            yield from _values_read(value, depth - 1)
        elif isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in ("torch", "math", "operator", "typing"):
                yield name
        elif not (isinstance(value, type) or callable(value) or hasattr(builtins, name)):
            yield name


def _names_in(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
