"""Find the random generators of the user's own that a model and its loss function draw from.

A test runs the same samples several times, each time with the same random numbers. The global
generators of torch, Python and NumPy are known; one of the user's own (`torch.Generator()`,
`numpy.random.default_rng()`, `random.Random()`) is looked for where the code can reach it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from wholebatch.window.forward_state import is_generator

_MOST = 2000
"""The limit on objects that are looked at."""


def own_generators(model: nn.Module, loss: Any) -> list[Any]:
    """Return the random generators that the code of the model or the loss function can reach.

    Looked at are attributes, closures, defaults, the globals that functions name, and what these
    hold, nearest first.
    """
    waiting: list[Any] = [loss, *model.modules()]
    known = set(map(id, waiting))
    found = []
    for value in waiting:  # grows on the way
        if is_generator(value):
            found.append(value)
            continue
        for inner in _inside(value):
            if id(inner) not in known and len(waiting) < _MOST:
                known.add(id(inner))
                waiting.append(inner)
    return found


def _inside(value: Any) -> Iterable[Any]:
    """Return what a function, a container or an object holds; nothing of tensors and classes."""
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        defaults = (value.__defaults__ or (), (value.__kwdefaults__ or {}).values())
        return [*cells, *named, *(one for some in defaults for one in some)]
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set)):
        return value
    if isinstance(value, (Tensor, type, types.ModuleType, str, bytes, int, float)):
        return ()
    held = list(getattr(value, "__dict__", {}).values())
    name = "forward" if isinstance(value, nn.Module) else "__call__"
    return [*held, *(vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind))]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
