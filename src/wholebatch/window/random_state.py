"""Random generators: their states, and those that the code of a model or a loss can reach.

The global generators of torch, Python and NumPy are known; one of the user's own
(`torch.Generator()`, `numpy.random.default_rng()`, `random.Random()`) is looked for where the code
can reach it.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import StateError

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


def is_generator(value: Any) -> bool:
    """True for a random generator: torch's, Python's or NumPy's."""
    if isinstance(value, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState)
    )


def state_of(generator: Any) -> Any:
    """Return the state of a random generator, as a copy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return generator.get_state(legacy=False) if bits is None else bits.state


def set_state_of(generator: Any, state: Any) -> None:
    """Put a random generator back."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def capture_random(*, every: bool = True) -> dict[str, Any]:
    """Return the generators' states; `every=False` leaves out Python's and NumPy's (cheaper)."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return {**state, **capture_python_random()} if every else state


def capture_python_random() -> dict[str, Any]:
    """Return the states of Python's generator and of NumPy's, if the program uses it already."""
    state: dict[str, Any] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        # Not as uint32: torch.save takes that dtype, plain pickle does not.
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Put every generator back to where it was captured."""
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state:
        here = torch.cuda.device_count()
        if here != len(state["cuda"]):
            raise StateError(
                f"random state of {len(state['cuda'])} CUDA devices, and {here} are here: "
                "resume on the same number of visible devices"
            )
        torch.cuda.set_rng_state_all([device.cpu() for device in state["cuda"]])
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.cpu().numpy().astype("uint32"), *rest))


def same_random(a: Any, b: Any) -> bool:
    """Return True if two captured states are equal: nothing was drawn between them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple) and type(a[0]) is int:  # Python's: 625 numbers, compared at once
        return bool(a == b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_random(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_random(a[key], b[key]) for key in a)
    return bool((a == b).all()) if hasattr(a, "dtype") else bool(a == b)
