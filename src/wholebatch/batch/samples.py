"""The samples of a nested batch: how many there are, and which leaves hold them.

A batch consists of containers (mappings, dataclasses, named tuples, tuples, lists) and leaves
(everything else). `flatten` returns the leaves with dotted names such as `"inputs.input_ids"` or
`"0"`. `Structure.build` rebuilds the containers around new leaves:

>>> import torch
>>> leaves, structure = flatten({"x": torch.ones(2), "more": [1, None]})
>>> [leaf.name for leaf in leaves]
['x', 'more.0', 'more.1']
>>> structure.build(["a", "b", "c"])
{'x': 'a', 'more': ['b', 'c']}

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

import copy
import dataclasses
import math
import sys
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Number
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from wholebatch.errors import OptionError, SplitError


@dataclass(frozen=True)
class Leaf:
    """A value of the batch that is not taken apart, and its dotted name."""

    name: str
    value: Any
    batched: bool = False
    """True if it holds one entry per sample; known in a `Layout`."""


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


def to_device(micro: Any, device: torch.device | str | int) -> Any:
    """Return `micro` with every tensor on `device`; return it unchanged if it is already there.

    Copies to a CUDA device go through pinned memory and do not block the host, so they overlap with
    work queued on the device. Everything that is not a tensor stays as it is.
    """
    target = torch.device(device)
    leaves, structure = flatten(micro)
    moved = [_move(leaf.value, target) for leaf in leaves]
    if all(new is leaf.value for new, leaf in zip(moved, leaves, strict=True)):
        return micro
    return structure.build(moved)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, PackedSequence):
        packed: Any = value  # Its annotation has only one of the signatures of Tensor.to.
        return packed.to(device)
    if not isinstance(value, Tensor):
        return value
    if device.type != "cuda" or value.device.type != "cpu":
        return value.to(device)
    if value.layout == torch.strided and not value.is_nested and not value.is_pinned():
        # A copy from pageable memory always blocks the host. The pinned block is released only
        # after the copy: PyTorch's host allocator marks it with an event.
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


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
    """The number of samples of a batch, and its leaves."""

    size: int
    leaves: tuple[Leaf, ...]
    structure: Structure

    def take(self, rows: Rows) -> Any:
        """Return a batch of the samples `rows`: views for a slice, copies for a list of indices."""
        return self.structure.build(
            [take(leaf.value, rows) if leaf.batched else leaf.value for leaf in self.leaves]
        )


def batch_size_of(batch: Any, *, batch_size: BatchSize = None, static: Static = ()) -> int:
    """Return the number of samples in `batch`, determined as `split` does.

    >>> batch_size_of({"x": torch.ones(6, 2), "y": torch.ones(6), "temperature": 0.5})
    6
    """
    return layout_of(batch, batch_size=batch_size, static=static).size


def layout_of(batch: Any, *, batch_size: BatchSize = None, static: Static = ()) -> Layout:
    """Return which leaves of `batch` hold samples, and how many samples there are."""
    fixed = _fixed(static, batch)
    ballot: _Ballot = {}
    _vote("", batch, ballot, fixed)
    size = _elected(ballot, batch) if batch_size is None else _declared(batch, batch_size)
    if size == 0:
        raise SplitError("the batch has zero samples: skip it, or see why the loader yields it")
    # The batch was elected by its parts: it is not a list of samples even if its length fits.
    root_is_parts = batch_size is None and not _root_may_be_samples(batch)

    def is_leaf(name: str, node: Any) -> bool:
        if name in fixed:
            return True
        if _reaches_into(fixed, name) or (root_is_parts and not name):
            return False
        return _is_samples(name, node, size)

    found, structure = flatten(batch, is_leaf)
    leaves = tuple(
        Leaf(x.name, x.value, x.name not in fixed and _has_samples(x.value, size)) for x in found
    )
    if not any(leaf.batched for leaf in leaves):
        raise SplitError(
            f"batch_size={size}: no leaf of the batch has so many samples; first dimensions and "
            f"lengths found: {_listed(ballot, ballot) or 'none'}"
        )
    return Layout(size, leaves, structure)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a structure, in their order; none if it cannot be read."""
    try:
        return [leaf.value for leaf in flatten(tree)[0] if isinstance(leaf.value, Tensor)]
    except Exception:  # an object that cannot be taken apart
        return []


def readable_layout(batch: Any, batch_size: BatchSize, static: Static) -> Layout | None:
    """Return the layout; where it cannot be told, as many samples as the first tensor says."""
    try:
        return layout_of(batch, batch_size=batch_size, static=static)
    except SplitError:
        sizes = [len(tensor) for tensor in tensors_of(batch) if tensor.dim()]
        return layout_of(batch, batch_size=sizes[0], static=static) if any(sizes[:1]) else None


def check_layout(batch_size: object, static: object) -> None:
    """Refuse options that are invalid for every batch, before there is one."""
    if batch_size is not None and not callable(batch_size) and not is_positive(batch_size):
        raise OptionError(f"batch_size={batch_size!r}: {_BATCH_SIZE}")
    _names(static)


def digests(tree: Any) -> list[float]:
    """Return a few numbers that are others if a tensor has other values, or in another order."""
    found = []
    for leaf in flatten(tree)[0]:
        if isinstance(leaf.value, Tensor) and leaf.value.numel():
            flat = leaf.value.detach().to_dense() if leaf.value.is_sparse else leaf.value.detach()
            flat = (torch.view_as_real(flat) if flat.is_complex() else flat).double().flatten()
            places = torch.arange(1, len(flat) + 1, device=flat.device)
            found += [float(len(flat)), float(flat.sum()), float(flat.dot(places.double().sqrt()))]
    return [number for number in found if math.isfinite(number)]


def is_other(tree: Any, digested: Sequence[float]) -> bool:
    """True if these are not the tensors with these digests; a device may sum in another order."""
    found = digests(tree)
    return len(found) != len(digested) or not all(
        math.isclose(*pair, rel_tol=1e-9, abs_tol=1e-9)
        for pair in zip(found, digested, strict=True)
    )


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


def _fixed(static: Static, batch: Any) -> frozenset[str]:
    """Return the leaves, or whole branches, that the caller declares to hold no samples."""
    names = _names(static)
    known = dict(_nodes("", batch)) if names else {}
    for name in names:
        if name not in known:
            leaves = ", ".join(leaf.name for leaf in flatten(batch)[0]) or "none"
            raise SplitError(f"static={name!r}: the batch has no such leaf; it has {leaves}")
    return frozenset(names)


def _reaches_into(fixed: frozenset[str], name: str) -> bool:
    return any(not name or one.startswith(f"{name}.") for one in fixed)


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


def _vote(name: str, node: Any, ballot: _Ballot, fixed: frozenset[str]) -> None:
    """Record each leaf of `node` under the number of samples that it votes for."""
    if name in fixed:
        return
    _refuse_unsplittable(name, node)
    if is_array(node):
        if node.ndim > 0:
            ballot.setdefault(int(node.shape[0]), []).append(name)
    elif not _reaches_into(fixed, name) and (
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
