"""What a graph was traced under: the plain values that a model and its loss function hold.

Tracing runs the Python of a model once, and every number it meets is part of the graph from then
on. So the numbers that a model or a loss function holds (an annealed weight, `training`, a dropout
rate) are looked at again at every window; when one has changed, the graph is made anew.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.execute.notes import CannotTrace

__all__ = ["Fingerprint", "only_reads", "refuse_hooks"]

_PLAIN = (int, float, bool, str, type(None))
_COMPILED = ("OptimizedModule", "RecursiveScriptModule", "TopLevelTracedModule")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Fingerprint:
    """Everything plain that the forward of a model under a loss function may read.

    `holds()` is asked at every window, while the device waits, so it must not cost much: what was
    plain is compared by name, and a module with more or fewer attributes than before has changed.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self._model = model
        self._loss = loss
        self._modules = [_Attributes(module) for module in model.modules()]
        self._held = tuple(_held_by(loss))
        self._deterministic = torch.are_deterministic_algorithms_enabled()

    def holds(self) -> bool:
        """Whether nothing has changed since it was taken."""
        return (
            self._deterministic == torch.are_deterministic_algorithms_enabled()
            and all(module.hold() for module in self._modules)
            and tuple(_held_by(self._loss)) == self._held
        )


class _Attributes:
    """The plain attributes of one module, and which tensors and modules it has."""

    def __init__(self, module: nn.Module) -> None:
        self._all = vars(module)
        self._number = len(self._all)
        plain = {name: value for name, value in self._all.items() if _is_plain(value)}
        names = tuple(plain)
        self._read = operator.itemgetter(*names) if names else _nothing
        self._values = self._read(self._all)
        self._parts = (module._parameters, module._buffers, module._modules)
        self._ids = self._identities()

    def _identities(self) -> list[int]:
        return [id(value) for part in self._parts for value in part.values()]

    def hold(self) -> bool:
        if len(self._all) != self._number or self._identities() != self._ids:
            return False
        try:
            return bool(self._read(self._all) == self._values)
        except KeyError:
            return False


def _nothing(_: object) -> None:
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)


def _held_by(function: Any) -> Iterator[Hashable]:
    """Plain values in a function's closure, defaults, bound object and the globals it names."""
    function = getattr(function, "func", function)  # functools.partial
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, nn.Module):
        yield from (
            value for value in getattr(owner, "__dict__", {}).values() if isinstance(value, _PLAIN)
        )
    function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not yet filled
            continue
        if isinstance(value, Tensor):
            yield id(value)  # a constant of the graph: another tensor is another graph
        elif isinstance(value, _PLAIN):
            yield value
    code = getattr(function, "__code__", None)
    names = getattr(function, "__globals__", {})
    for name in code.co_names if code is not None else ():
        value = names.get(name)
        if isinstance(value, Tensor):
            yield name, id(value)
        elif isinstance(value, _PLAIN):
            yield name, value


def refuse_hooks(model: nn.Module) -> None:
    """Hooks may do anything in Python, and a graph would do it once only.

    A module that torch.compile or torch.jit has made its own is not Python any more.
    """
    for name, module in model.named_modules():
        if type(module).__name__ in _COMPILED:
            raise CannotTrace(f"{name or 'the model'} is an {type(module).__name__}")
        for kind in _HOOKS:
            if getattr(module, kind, None):
                raise CannotTrace(
                    f"{name or 'the model'} has {kind.strip('_').replace('_', ' ')}, which a graph "
                    "would run only once"
                )


@contextmanager
def only_reads(model: nn.Module) -> Iterator[None]:
    """Within it the model's Python may run, but not leave a trace; CannotTrace if it did.

    What it changed (a counter, a tensor kept for later) is put back.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()[1].tobytes()
    yield
    changed = []
    for module, found in before:
        now = vars(module)
        for name in now.keys() | found.keys():
            if now.get(name) is not found.get(name, now) and not _same(
                now.get(name), found.get(name)
            ):
                changed.append(f"{type(module).__name__}.{name}")
                if name in found:
                    now[name] = found[name]
                else:
                    del now[name]
    if changed:
        raise CannotTrace(f"its forward changes {', '.join(sorted(set(changed))[:3])}")
    if random.getstate() != python:
        random.setstate(python)
        raise CannotTrace("its forward draws from Python's random module")
    if numpy is not None and numpy.random.get_state()[1].tobytes() != drawn:
        raise CannotTrace("its forward draws from numpy's random module")


def _same(now: object, found: object) -> bool:
    return isinstance(now, _PLAIN) and not isinstance(now, Tensor) and now == found
