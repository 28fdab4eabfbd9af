"""Code that no graph can stand for: hooks, recurrent layers, random generators of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.window.forward_state import (
    capture_python_random,
    restore_random,
    same_random,
    set_state_of,
    state_of,
)
from wholebatch.window.reachable_objects import own_generators

_COMPILED = ("OptimizedModule", "RecursiveScriptModule", "TopLevelTracedModule")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_traceable_hook(hook: Any) -> bool:
    """True for hooks that leave nothing behind in Python.

    They are those that require gradients, and the hooks by which transformers hands the outputs of
    inner layers to its caller.
    """
    return only_requires_grad(hook) or hook.__module__ == "transformers.utils.output_capturing"


def only_requires_grad(hook: Any) -> bool:
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
    """
    for name, module in model.named_modules():
        if type(module).__name__ in _COMPILED:
            raise CannotTrace(f"{name or 'the model'} is an {type(module).__name__}")
        for kind in _HOOKS:
            hooks = getattr(module, kind, None) or {}
            if not all(map(_is_traceable_hook, hooks.values())):
                raise CannotTrace(
                    f"{name or 'the model'} has {kind.strip('_').replace('_', ' ')}, which a graph "
                    "would run only once"
                )


def refuse_recurrent_layers(model: nn.Module) -> None:
    """Raise CannotTrace for nn.LSTM, nn.GRU and nn.RNN: cuDNN runs each as one kernel already."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.RNNBase):
            raise CannotTrace(
                f"{name or 'the model'} is an nn.{type(layer).__name__}, which runs eagerly only"
            )


@contextmanager
def only_our_draws(model: nn.Module, loss: Callable[..., Any]) -> Iterator[None]:
    """Refuse code that draws from a generator that a graph does not know; put them all back."""
    random = capture_python_random()
    own = [(generator, state_of(generator)) for generator in own_generators(model, loss)]
    try:
        yield
    finally:
        now = capture_python_random()
        restore_random(random)
        drawn = [
            generator for generator, state in own if not same_random(state, state_of(generator))
        ]
        for generator, state in own:
            set_state_of(generator, state)
    for name, library in (("python", "Python"), ("numpy", "numpy")):
        if name in random and not same_random(random[name], now[name]):
            raise CannotTrace(f"its forward draws from {library}'s random module")
    if drawn:
        raise CannotTrace(f"it draws from a {type(drawn[0]).__name__} of its own")
