"""Follow tensors through a loop: see every torch call that is made with them, and its results.

No mode is switched on. A tensor that a `Follower` has a note about gets a class of its own, until
the follower stops. Whatever else runs is not seen. A loop that is left early leaves a few such
tensors behind, which get their own class back at their next use once the loop is gone.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary


class FollowedTensor(Tensor):
    """A tensor that a follower has a note about."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == Tensor.__iter__:
            return iter(args[0].unbind())
        followed = [one for one in tensors_in(args, kwargs) if type(one) is cls]
        here = [one for one in followers() if one.thread == threading.get_ident()]
        _set_classes(followed, [])
        try:
            with torch._C.DisableTorchFunctionSubclass():
                seen = [one.see(func, args, kwargs) for one in here]
                result = func(*args, **kwargs)
                for after in seen:
                    after(result)
                return result
        finally:
            _set_classes(followed, followers())


class Follower(ABC):
    """Keeps notes about the tensors that it follows; others may follow the same ones."""

    def __init__(self) -> None:
        self.on = self.pauses = False
        self.thread = 0
        self.notes: Any = WeakTensorKeyDictionary()
        _all.add(self)

    def start(self) -> None:
        """Follow the calls of this thread with the tensors that there are notes about."""
        self.on, self.pauses, self.thread = True, False, threading.get_ident()

    def stop(self, *, clear: bool = False) -> None:
        """Follow no more; `clear` what was found."""
        self.on, held = False, list(self.notes)
        if clear:
            self.notes.clear()
        _set_classes(held, followers())

    def pause(self, pauses: bool) -> None:
        """Look away from what a model does, or go on after it."""
        self.pauses = pauses
        _set_classes(list(self.notes), followers())

    def note(self, tensor: Tensor, about: Any) -> None:
        """Follow this tensor, if it is a plain one."""
        if type(tensor) in (Tensor, FollowedTensor):
            self.notes[tensor] = about
            _set_classes([tensor], followers())

    @abstractmethod
    def see(self, func: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        """Look at a call before it is made; return what is to be called with its result."""


_all: WeakSet[Follower] = WeakSet()


def followers() -> list[Follower]:
    """Return those that look now."""
    return [one for one in list(_all) if one.on and not one.pauses]


def _set_classes(tensors: Iterable[Tensor], by: Sequence[Follower]) -> None:
    """Let those of these tensors be seen that are followed by one of these."""
    for one in tensors:
        one.__class__ = FollowedTensor if any(one in f.notes for f in by) else Tensor


def tensors_in(*trees: Any) -> list[Tensor]:
    """Return the tensors of nested structures."""
    return [one for one in tree_leaves(trees) if isinstance(one, Tensor)]
