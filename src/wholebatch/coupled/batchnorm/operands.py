"""The tensor arguments of an operation, and those that it writes to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor

__all__ = ["tensors_in", "written_by"]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)


@cache
def written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
