"""The plain values of a model and its loss function that a graph was traced with.

Tracing runs the model's Python once and bakes every number it meets into the graph. So the numbers
held by a model or a loss function (an annealed weight, `training`, a dropout rate) are compared
again at every window. If one has changed, the graph is made again.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from wholebatch.compile.captured_state import PLAIN, Reach
from wholebatch.compile.messages import CannotTrace

__all__ = ["Fingerprint", "only_reads", "refuse_hooks"]

_OF_RNNS = ("_flat_weights", "_flat_weight_refs")
"""Lists of weights that torch's recurrent layers keep, and rebuild when the weights change."""
_COMPILED = ("OptimizedModule", "RecursiveScriptModule", "TopLevelTracedModule")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Fingerprint:
    """All plain values that the forward of a model under a loss function may read.

    `changed()` runs at every window while the device waits, so it must be cheap. Plain values are
    compared by name, and a module that gained or lost attributes counts as changed.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self._modules = [_Attributes(name, module) for name, module in model.named_modules()]
        self._reach = Reach(model, loss)
        self._deterministic = torch.are_deterministic_algorithms_enabled()

    def changed(self) -> str | None:
        """Return the name of the first thing that has changed, or None."""
        if self._deterministic != torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms"
        for module in self._modules:
            if not module.hold():
                return module.name
        return self._reach.changed()

    def holds(self) -> bool:
        """True if nothing has changed."""
        return self.changed() is None


class _Attributes:
    """The plain attributes of one module, and the identities of its tensors and submodules."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = f"an attribute of {name or 'the model'}"
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
        return all(isinstance(item, PLAIN) for item in value)
    return isinstance(value, PLAIN)


def refuse_hooks(model: nn.Module) -> None:
    """Raise CannotTrace for a model with hooks: a graph would run their Python only once.

    Modules made by torch.compile or torch.jit are refused too: their forward is no longer Python.
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
def only_reads(model: nn.Module, loss: Callable[..., Any]) -> Iterator[None]:
    """Run the model's Python without side effects; raise CannotTrace if it had any.

    Its changes (a counter, a tensor kept for later) are undone.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    reach = Reach(model, loss)
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        changed = sorted(set(_put_back(before)))[:3]
        written = reach.written()
        reach.restore()
        by_python = random.getstate() != python
        random.setstate(python)
        by_numpy = numpy is not None and not _same_state(numpy.random.get_state(), drawn)
        if by_numpy:
            numpy.random.set_state(drawn)  # type: ignore[union-attr]
    if changed:
        raise CannotTrace(f"its forward changes {', '.join(changed)}")
    if written is not None:
        raise CannotTrace(f"it changes {written}, which a graph would do only once")
    if by_python:
        raise CannotTrace("its forward draws from Python's random module")
    if by_numpy:
        raise CannotTrace("its forward draws from numpy's random module")


def _put_back(before: list[tuple[nn.Module, dict[str, Any]]]) -> Iterator[str]:
    """Restore the attributes of the modules, and yield the names of those that had changed."""
    for module, found in before:
        now = vars(module)
        for name in now.keys() | found.keys():
            if _same(now.get(name, now), found.get(name, found)):
                continue
            if not (isinstance(module, nn.RNNBase) and name in _OF_RNNS):
                yield f"{type(module).__name__}.{name}"
            if name in found:
                now[name] = found[name]
            else:
                del now[name]


def _same_state(one: Any, other: Any) -> bool:
    """Compare two states of NumPy's generator: its numbers, and its position in them."""
    return bool(one[1].tobytes() == other[1].tobytes() and one[2:] == other[2:])


def _same(now: object, found: object) -> bool:
    if now is found:
        return True
    return isinstance(now, PLAIN) and now == found
