"""The program that is watched: functions that are replaced in it, and the trainer at work."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

_TRAINERS = {
    "trl": "TRL",
    "transformers": "HF Trainer",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
}
"""Packages that drive a loop, the outermost first."""


@contextmanager
def replaced(around: Mapping[tuple[Any, str], Callable[..., Any]]) -> Iterator[None]:
    """Call `around(original, *args)` in place of functions, by their owner and name.

    A function is replaced in modules that imported it, too, by its name or a private one.
    """
    names = {name for owner, name in around if not isinstance(owner, type)}
    names |= {f"_{name}" for name in names}
    modules = [module for module in sys.modules.values() if hasattr(module, "__dict__")]
    known = [(module, name) for module in modules for name in names & vars(module).keys()]
    undo = []
    for (owner, name), function in around.items():
        original = getattr(owner, name)
        places = [(owner, name)]
        if not isinstance(owner, type):
            places = [(module, n) for module, n in known if vars(module)[n] is original]
        for place, known_as in places:
            setattr(place, known_as, _around(original, function))
            undo.append((place, known_as, original))
    try:
        yield
    finally:
        for place, known_as, original in reversed(undo):
            setattr(place, known_as, original)


def _around(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return called


def trainer_at_hand() -> str:
    """Return which library drives the loop, by the modules on the call stack."""
    frames = traceback.walk_stack(None)
    packages = {f.f_globals.get("__name__", "").partition(".")[0] for f, _ in frames}
    return next((name for key, name in _TRAINERS.items() if key in packages), "plain torch")
