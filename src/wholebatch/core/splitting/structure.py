"""Nested batches as named leaves and a structure to rebuild them with their types.

A batch consists of containers (mappings, dataclasses, named tuples, tuples, lists) and leaves
(everything else). `flatten` returns the leaves with dotted names such as `"inputs.input_ids"` or
`"0"`. `Structure.build` rebuilds the containers around new leaves:

>>> import torch
>>> leaves, structure = flatten({"x": torch.ones(2), "more": [1, None]})
>>> [leaf.name for leaf in leaves]
['x', 'more.0', 'more.1']
>>> structure.build(["a", "b", "c"])
{'x': 'a', 'more': ['b', 'c']}
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from wholebatch.errors import SplitError

__all__ = ["Leaf", "Structure", "children", "flatten", "is_array", "is_record"]


@dataclass(frozen=True)
class Leaf:
    """A value of the batch that is not taken apart, and its dotted name."""

    name: str
    value: Any


@dataclass(frozen=True)
class Structure:
    """The containers of a batch without their leaves; a `None` container is one leaf."""

    container: Any
    parts: tuple[Structure, ...] = ()

    def build(self, values: Sequence[Any]) -> Any:
        """Build new containers around `values` (one for each leaf, in order)."""
        return self._build(iter(values))

    def _build(self, values: Iterator[Any]) -> Any:
        if self.container is None:
            return next(values)
        return _rebuild(self.container, [part._build(values) for part in self.parts])


_LEAF = Structure(None)


def flatten(
    batch: Any, is_leaf: Callable[[str, Any], bool] | None = None
) -> tuple[list[Leaf], Structure]:
    """Return the leaves of `batch` in order, and the structure to rebuild it.

    `is_leaf(name, container)` keeps a container whole: it is then a leaf itself.
    """
    leaves: list[Leaf] = []
    return leaves, _visit("", batch, is_leaf, leaves)


def _visit(
    name: str, node: Any, is_leaf: Callable[[str, Any], bool] | None, leaves: list[Leaf]
) -> Structure:
    # Not a nested function of `flatten`: a recursive closure is a reference cycle, which would keep
    # the batch's tensors alive until garbage collection.
    inner = children(node)
    if inner is None or (is_leaf is not None and is_leaf(name, node)):
        leaves.append(Leaf(name, node))
        return _LEAF
    return Structure(
        node, tuple([_visit(join(name, key), value, is_leaf, leaves) for key, value in inner])
    )


def join(name: str, key: str) -> str:
    """Return the dotted name of the child `key` of `name`; the whole batch has the name ''."""
    return f"{name}.{key}" if name else key


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the named children of a container, or None for a leaf."""
    if isinstance(node, Tensor):
        return None  # By far the most common case, and the tests below are slow.
    if isinstance(node, Mapping):
        inner = [(str(key), value) for key, value in node.items()]
        return inner + [(name, getattr(node, name)) for name in _list_attributes(node)]
    if isinstance(node, PackedSequence):
        return None  # A named tuple by type, but its parts are meaningless one by one.
    if _is_named_tuple(node):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, (list, tuple)):
        return [(str(index), value) for index, value in enumerate(node)]
    if _is_dataclass(node):
        return [(name, getattr(node, name)) for name in _field_names(node)]
    return None


def is_array(value: Any) -> bool:
    """True if `value` is a tensor or a NumPy array (NumPy is never imported for this)."""
    if isinstance(value, Tensor):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_record(value: Any) -> bool:
    """True if the parts of `value` have names: a mapping, dataclass or named tuple."""
    return isinstance(value, Mapping) or _is_named_tuple(value) or _is_dataclass(value)


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields") and hasattr(node, "_make")


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _field_names(node: Any) -> list[str]:
    # A field with init=False may never have been set.
    return [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]


def _list_attributes(node: Any) -> list[str]:
    """Return the names of lists that a UserDict carries beside its items.

    Hugging Face's BatchEncoding keeps the tokenizer's per-sample encodings this way. If they were
    not split too, `micro.word_ids(0)` would answer for another sample.
    """
    if not isinstance(node, UserDict):
        return []
    return [name for name, value in vars(node).items() if isinstance(value, list)]


def _rebuild(node: Any, values: list[Any]) -> Any:
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, values)
    if isinstance(node, list):
        return values if type(node) is list else type(node)(values)
    if isinstance(node, tuple):
        if all(old is new for old, new in zip(node, values, strict=True)):
            return node  # Immutable, so it can be shared (and a torch.Size stays one).
        if _is_named_tuple(node):
            return type(node)._make(values)  # type: ignore[attr-defined]
        return tuple(values) if type(node) is tuple else type(node)(values)
    return _rebuild_dataclass(node, values)


def _rebuild_dataclass(node: Any, values: list[Any]) -> Any:
    changed = [
        (name, new)
        for name, new in zip(_field_names(node), values, strict=True)
        if getattr(node, name) is not new
    ]
    if not changed:
        return node
    # Not dataclasses.replace: it runs __init__ again and loses init=False fields.
    made = copy.copy(node)
    for name, new in changed:
        object.__setattr__(made, name, new)  # Works for frozen dataclasses too.
    return made


def _rebuild_mapping(node: Mapping[Any, Any], values: list[Any]) -> Any:
    items = dict(zip(node, values, strict=False))
    if not isinstance(node, MutableMapping):
        return type(node)(items)  # type: ignore[call-arg]
    made = copy.copy(node)
    # A class that keeps its items in a dict of its own and has no __copy__ shares that dict with
    # its copy. Writing the new values would then change the caller's batch.
    for key, new in items.items():
        old = node[key]
        if old is new:
            continue
        made[key] = new
        if node[key] is new:
            made[key] = old
            raise SplitError(
                f"a batch of type {type(node).__name__}: its copy.copy() shares its items with the "
                "original; give the class a __copy__ that copies them, or pass a dict"
            )
    for name, new in zip(_list_attributes(node), values[len(items) :], strict=True):
        setattr(made, name, new)
    return made
