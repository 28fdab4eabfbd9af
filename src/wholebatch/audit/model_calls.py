"""The outermost calls of some models in a first window, seen by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

import torch
from torch import nn

from wholebatch.window.autograd_graph import in_backward, transforms_active

_watching: WeakSet[ModelCalls] = WeakSet()


@contextmanager
def unwatched() -> Iterator[None]:
    """Take all hooks off the models, so that a graph can be made of a forward."""
    watching = list(_watching)
    for calls in watching:
        calls.take_off()
    try:
        yield
    finally:
        for calls in watching:
            calls.put_on()


class ModelCalls:
    """Tells of the outermost calls with gradients of some models; holds none of them.

    Args:
        models: The models; their layers count, too, where they are called directly.
        before: Each is called with the module and its arguments, before the call.
        after: Each is called with the arguments and the output.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        before: Iterable[Callable[[nn.Module, Any], None]],
        after: Iterable[Callable[[Any, Any], None]],
    ) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet(m for model in models for m in model.modules())
        self._before, self._after = list(before), list(after)
        self._handles: list[Any] = []
        self._depth = 0
        finalize(self, _remove, self._handles)
        self.put_on()

    def put_on(self) -> None:
        """Put hooks on the models."""
        _watching.add(self)
        enter, leave = _Hook(self._enter), _Hook(self._leave)
        for module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True, always_call=True),
            ]

    def take_off(self) -> None:
        """Take the hooks off again."""
        _watching.discard(self)
        _remove(self._handles)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        for before in self._before if self._depth == 1 and torch.is_grad_enabled() else ():
            before(module, (args, kwargs))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        for after in self._after if self._depth == 0 and torch.is_grad_enabled() else ():
            after((args, kwargs), output)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


class _Hook:
    """A hook that leaves itself out of copies and pickles of the model, and of compiled code."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, *call: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or transforms_active() or in_backward():
            return
        method = self._method()
        if method is not None:
            method(*call)

    def __reduce__(self) -> Any:
        return partial, (_do_nothing,)


def _do_nothing(*call: Any) -> None:
    """Stand for a hook in a copy of the model."""
