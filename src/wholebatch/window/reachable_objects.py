"""What the code of a model or a loss function can reach: its modules, and random generators."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from wholebatch.window.forward_state import is_generator

_MOST = 2000
"""The limit on objects that are looked at."""
_HOLD_NOTHING = frozenset({str, bytes, bool, int, float, type(None), Tensor, nn.Parameter})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})
"""Most objects of a module are empty ones of these: they are not kept."""


def own_generators(model: nn.Module, loss: Any) -> list[Any]:
    """Return the random generators that the code of the model or the loss function can reach.

    Looked at are attributes, closures, defaults, the globals that functions name, and what these
    hold, nearest first.
    """
    waiting: list[Any] = [loss, *model.modules()]
    known = set(map(id, waiting))
    generators = []
    for value in waiting:  # grows on the way
        if is_generator(value):
            generators.append(value)
            continue
        for inner in inside(value):
            if type(inner) in _HOLD_NOTHING or (type(inner) in _CONTAINERS and not inner):
                continue
            if id(inner) not in known and len(waiting) < _MOST:
                known.add(id(inner))
                waiting.append(inner)
    return generators


def inside(value: Any) -> Iterable[Any]:
    """Return what a function, a container or an object holds; nothing of tensors and classes."""
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.FunctionType):
        cells = [content_of(cell) for cell in value.__closure__ or ()]
        # What a function of torch names is torch's; a wrapper of its own still holds the user's.
        is_torch = str(value.__globals__.get("__name__")).split(".")[0] == "torch"
        names = () if is_torch else _names(value.__code__)
        named = (value.__globals__.get(name) for name in names)
        defaults = (value.__defaults__ or (), (value.__kwdefaults__ or {}).values())
        return [*cells, *named, *(default for values in defaults for default in values)]
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set)):
        return value
    if isinstance(value, (Tensor, type, types.ModuleType, str, bytes, int, float)):
        return ()
    held = list(getattr(value, "__dict__", {}).values())
    name = "forward" if isinstance(value, nn.Module) else "__call__"
    return [*held, *(vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind))]


def _names(code: types.CodeType) -> list[str]:
    """Return the names in this code, with those of the functions that are made in it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return [*code.co_names, *(name for each in inner for name in _names(each))]


def content_of(cell: types.CellType) -> Any:
    """Return what a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
