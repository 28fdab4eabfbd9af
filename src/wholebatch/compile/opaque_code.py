"""Code that no graph can stand for: hooks, recurrent layers, and functions that Dynamo skips."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from wholebatch.compile.execute_mode import CannotTrace

_COMPILED = ("OptimizedModule", "RecursiveScriptModule", "TopLevelTracedModule")
_KNOWN = ("torch", "wholebatch", "einops")
"""The packages whose functions read nothing that changes."""
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


def is_opaque(target: Any) -> bool:
    """True for a Python function of the user's that Dynamo does not look into.

    Such functions are marked with `torch.compiler.allow_in_graph`, or are the backward of a custom
    operation. What they read would be a constant of the graph.
    """
    from torch._library.custom_ops import OPDEFS

    if isinstance(target, types.FunctionType):
        return (target.__module__ or "").partition(".")[0] not in _KNOWN
    operation = target.default if isinstance(target, torch._ops.OpOverloadPacket) else target
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    return getattr(OPDEFS.get(operation._schema.name), "_backward_fn", None) is not None
