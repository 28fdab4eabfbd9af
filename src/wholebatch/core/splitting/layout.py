"""The samples of a batch: how many there are, and which leaves hold them.

Every array votes for its first dimension. Every list or tuple that could be a list of samples votes
for its length. The items inside such a list have one vote together, since the list is one leaf. The
number with the most votes is the number of samples. A tie is an error: a wrong guess would silently
train on nonsense.

A list can be read in two ways: `[x, y]` are parts of the batch, `[image, image, image]` are
samples. It is read as samples if its length is the number of samples and its items are of one kind,
unless they have a batch dimension themselves. If both readings fit, a tuple is parts, a list of
dicts is samples, and a list of tensors is refused. A batch that is itself a list or tuple, as
`DataLoader` makes it, is parts, unless its items are strings or look like samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Number
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from wholebatch.core.splitting.structure import (
    Leaf,
    Structure,
    children,
    flatten,
    is_array,
    is_record,
    join,
)
from wholebatch.errors import OptionError, SplitError

__all__ = [
    "BatchSize",
    "Layout",
    "Rows",
    "Static",
    "batch_size_of",
    "check_layout",
    "is_positive",
    "layout_of",
    "readable_layout",
    "take",
]

# Hints about the batch that callers of `split` may give.
BatchSize = int | Callable[[Any], int] | None
Static = str | Iterable[str]
Rows = slice | list[int]

# This many arrays of one dtype and number of dimensions, with nothing beside them, are more likely
# uncollated samples than parts of a batch, if they are images or differ in length.
_MANY = 4

_BATCH_SIZE = "must be a positive number of samples, or a function of the batch that returns it"


@dataclass(frozen=True)
class Layout:
    """The leaves of a batch, with a flag for each that holds one entry per sample."""

    size: int
    leaves: tuple[Leaf, ...]
    batched: tuple[bool, ...]
    structure: Structure

    def take(self, rows: Rows) -> Any:
        """Return a batch of the samples `rows`: views for a slice, copies for a list of indices."""
        return self.structure.build(
            [
                take(leaf.value, rows) if batched else leaf.value
                for leaf, batched in zip(self.leaves, self.batched, strict=True)
            ]
        )


def batch_size_of(batch: Any, *, batch_size: BatchSize = None, static: Static = ()) -> int:
    """Return the number of samples in `batch`, determined as `split` does.

    >>> batch_size_of({"x": torch.ones(6, 2), "y": torch.ones(6), "temperature": 0.5})
    6
    """
    return layout_of(batch, batch_size=batch_size, static=static).size


def layout_of(batch: Any, *, batch_size: BatchSize = None, static: Static = ()) -> Layout:
    """Return which leaves of `batch` hold samples, and how many samples there are."""
    fixed = _Fixed.of(static, batch)
    ballot: _Ballot = {}
    _vote("", batch, ballot, fixed)
    size = _elected(ballot, batch) if batch_size is None else _declared(batch, batch_size)
    if size == 0:
        raise SplitError("the batch has zero samples: skip it, or see why the loader yields it")
    # The batch was elected by its parts: it is not a list of samples even if its length fits.
    root_is_parts = batch_size is None and not _root_may_be_samples(batch)

    def is_leaf(name: str, node: Any) -> bool:
        if name in fixed.names:
            return True
        if fixed.reaches_into(name) or (root_is_parts and not name):
            return False
        return _is_samples(name, node, size)

    leaves, structure = flatten(batch, is_leaf)
    batched = tuple(x.name not in fixed.names and _has_samples(x.value, size) for x in leaves)
    if not any(batched):
        raise SplitError(
            f"batch_size={size}: no leaf of the batch has so many samples; first dimensions and "
            f"lengths found: {_listed(ballot, ballot) or 'none'}"
        )
    return Layout(size, tuple(leaves), batched, structure)


def readable_layout(batch: Any, batch_size: BatchSize, static: Static) -> Layout | None:
    """Return the layout; where it cannot be told, as many samples as the first tensor says."""
    try:
        return layout_of(batch, batch_size=batch_size, static=static)
    except SplitError:
        tensors = [leaf.value for leaf in flatten(batch)[0] if isinstance(leaf.value, Tensor)]
        sizes = [len(tensor) for tensor in tensors if tensor.dim()]
        return layout_of(batch, batch_size=sizes[0], static=static) if any(sizes[:1]) else None


def check_layout(batch_size: object, static: object) -> None:
    """Refuse options that are invalid for every batch, before there is one."""
    if batch_size is not None and not callable(batch_size) and not is_positive(batch_size):
        raise OptionError(f"batch_size={batch_size!r}: {_BATCH_SIZE}")
    _names(static)


def take(value: Any, rows: Rows) -> Any:
    """Return the samples `rows` of one leaf that has a batch dimension."""
    if isinstance(value, Tensor):
        if isinstance(rows, slice):
            if value.layout == torch.strided:
                return value[rows]
            rows = list(range(value.shape[0])[rows])  # A sparse tensor has no views by row.
        return value.index_select(0, torch.tensor(rows, device=value.device))
    if is_array(value):
        return value[rows]
    picked = value[rows] if isinstance(rows, slice) else [value[row] for row in rows]
    return picked if type(picked) is type(value) else type(value)(picked)


def is_positive(value: Any) -> bool:
    """True if an option is a positive whole number (True itself is not one)."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


# --- the number of samples ------------------------------------------------------------------

# The names of the leaves that vote for each number of samples.
_Ballot = dict[int, list[str]]


@dataclass(frozen=True)
class _Fixed:
    """The leaves, or whole branches, that the caller declares to hold no samples."""

    names: frozenset[str]

    @classmethod
    def of(cls, static: Static, batch: Any) -> _Fixed:
        names = _names(static)
        known = dict(_nodes("", batch)) if names else {}
        for name in names:
            if name not in known:
                leaves = ", ".join(leaf.name for leaf in flatten(batch)[0]) or "none"
                raise SplitError(f"static={name!r}: the batch has no such leaf; it has {leaves}")
        return cls(frozenset(names))

    def reaches_into(self, name: str) -> bool:
        return any(not name or fixed.startswith(f"{name}.") for fixed in self.names)


def _names(static: object) -> tuple[str, ...]:
    names = (static,) if isinstance(static, str) or not isinstance(static, Iterable) else (*static,)
    if not all(isinstance(name, str) and name for name in names):
        raise OptionError(f"static={static!r}: must be names of leaves, such as 'class_weights'")
    return names


def _nodes(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    yield name, node
    for key, value in children(node) or ():
        yield from _nodes(join(name, key), value)


def _declared(batch: Any, batch_size: int | Callable[[Any], int]) -> int:
    size = batch_size(batch) if callable(batch_size) else batch_size
    if not is_positive(size):
        raise OptionError(f"batch_size={size!r}: {_BATCH_SIZE}")
    return int(size)


def _elected(ballot: _Ballot, batch: Any) -> int:
    if not ballot:
        if isinstance(batch, (list, tuple)) and not batch:
            return 0
        raise SplitError(
            f"the batch (a {type(batch).__name__}) has no leaf with a batch dimension: give "
            "tensors, arrays or lists, in dicts, dataclasses, tuples or lists"
        )
    most = max(map(len, ballot.values()))
    winners = [size for size, names in ballot.items() if len(names) == most]
    if len(winners) > 1:
        raise SplitError(
            f"cannot tell the number of samples: {_listed(ballot, winners)} fit equally many "
            f"leaves; say batch_size={winners[0]}, or a function of the batch where it varies, "
            "batch_size=lambda batch: ..., or name the leaves without samples in static="
        )
    return winners[0]


def _listed(ballot: _Ballot, sizes: Iterable[int]) -> str:
    def speakers(size: int) -> str:
        names = [name or "the batch itself" for name in ballot[size]]
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

    return " and ".join(f"{size} ({speakers(size)})" for size in sizes)


def _vote(name: str, node: Any, ballot: _Ballot, fixed: _Fixed) -> None:
    """Record each leaf of `node` under the number of samples that it votes for."""
    if name in fixed.names:
        return
    _refuse_unsplittable(name, node)
    if is_array(node):
        if node.ndim > 0:
            ballot.setdefault(int(node.shape[0]), []).append(name)
    elif not fixed.reaches_into(name) and (
        _may_be_samples(node) if name else _root_may_be_samples(node)
    ):
        for key, value in children(node) or ():
            _vote(join(name, key), value, {}, fixed)  # Only to refuse leaves that cannot be split.
        for size in {len(node), *_spoken_for(node)}:
            ballot.setdefault(size, []).append(name)
    else:
        for key, value in children(node) or ():
            _vote(join(name, key), value, ballot, fixed)


def _spoken_for(node: Any) -> list[int]:
    """Return the batch dimension that most items of a list share, if there is one."""
    spoken: Counter[int] = Counter()
    for item in node:
        sizes = set(_first_dims(item))
        if not sizes and isinstance(item, list) and item and isinstance(item[0], str):
            sizes = {len(item)}  # Texts and their pairs: [["a", "b", "c"], ["d", "e", "f"]].
        if len(sizes) == 1:
            spoken[sizes.pop()] += 1
    return [size for size, count in spoken.items() if 2 * count > len(node)]


def _first_dims(node: Any) -> Iterator[int]:
    if is_array(node):
        if node.ndim > 0:
            yield int(node.shape[0])
        return
    for _, value in children(node) or ():
        yield from _first_dims(value)


def _refuse_unsplittable(name: str, value: Any) -> None:
    what = f"the leaf {name!r}" if name else "the batch"
    if isinstance(value, PackedSequence):
        raise SplitError(
            f"{what} is a PackedSequence, which interleaves its samples by time step: give the "
            "padded tensor and its lengths, and pack inside the loss function"
        )
    if not isinstance(value, Tensor):
        return
    if value.is_nested:
        raise SplitError(
            f"{what} is a nested (jagged) tensor, which has no batch dimension to slice: give a "
            "padded tensor with a mask, or a list of tensors"
        )
    if value.layout not in (torch.strided, torch.sparse_coo):
        raise SplitError(
            f"{what} has the layout {value.layout}, whose rows cannot be selected: convert it "
            "with .to_sparse_coo() or .to_dense()"
        )


# --- lists: samples, or parts of the batch ---------------------------------------------------


def _has_samples(value: Any, size: int) -> bool:
    if is_array(value):
        return bool(value.ndim > 0 and value.shape[0] == size)
    return isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence)


def _is_samples(name: str, node: Any, size: int) -> bool:
    """True if the container `node` is a list of samples, which is not taken apart further."""
    if not _may_be_samples(node) or len(node) != size:
        return False
    if size == 1 or any(first_dim != size for first_dim in _first_dims(node)):
        return True
    if not any(True for _ in _first_dims(node)):
        return True
    # Both readings fit from here on.
    if isinstance(node, tuple):
        return False
    if is_record(node[0]):
        return True
    if not name:
        return False
    raise SplitError(
        f"the list {name!r} has {size} items, and each has a first dimension of {size}: they could "
        "be samples or parts of the batch. Make it a tuple if they are parts, or a list of dicts "
        "if they are samples"
    )


def _may_be_samples(node: Any) -> bool:
    """True if `node` is a list or tuple with items of one kind, as samples are."""
    if is_record(node) or not isinstance(node, (list, tuple)):
        return False
    items = [item for item in node if item is not None]
    if not items or any(not _alike(items[0], item) for item in items[1:]):
        return False
    # (224, 224) is a size; [3, 7] are two labels.
    return isinstance(node, list) or not _only_numbers(node)


def _root_may_be_samples(node: Any) -> bool:
    if not _may_be_samples(node):
        return False
    first = next(item for item in node if item is not None)
    if is_array(first):
        lengths = set(_first_dims(node))
        return len(node) >= _MANY and (first.ndim >= 3 or len(lengths) > 1)
    if isinstance(first, (list, tuple)) and not is_record(first):
        return len(node) >= _MANY or not any(True for _ in _first_dims(node))
    return True


def _alike(a: Any, b: Any) -> bool:
    if is_array(a) and is_array(b):
        return bool(a.dtype == b.dtype and a.ndim == b.ndim)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys()
    if isinstance(a, tuple) and isinstance(b, tuple) and not (is_record(a) or is_record(b)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return type(a) is type(b) or (isinstance(a, Number) and isinstance(b, Number))


def _only_numbers(node: Any) -> bool:
    if isinstance(node, (list, tuple)):
        return all(map(_only_numbers, node))
    return node is None or isinstance(node, Number)
