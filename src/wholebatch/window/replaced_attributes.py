"""Attributes that are set for a while, and hooks that are off for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def replaced_attributes(owner: object, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object, a class or a module within the context; then restore its own."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    is_class = isinstance(owner, type)
    put = partial(setattr, owner) if is_class else own.__setitem__
    drop = partial(delattr, owner) if is_class else own.__delitem__
    try:
        for name, value in attributes.items():
            put(name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                put(name, before[name])
            elif name in own:
                drop(name)


@contextmanager
def emptied(dictionaries: Iterable[dict[Any, Any] | None]) -> Iterator[None]:
    """Empty dictionaries of hooks for a while; autograd holds them, so they cannot be replaced."""
    before = [(held, dict(held)) for held in dictionaries if held]
    for held, _ in before:
        held.clear()
    try:
        yield
    finally:
        for held, hooks in before:
            held.update(hooks)
