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

Which values hold samples is a contract, not a guess:

1. The number of samples is the first dimension of the first tensor (or NumPy array) outside of
   lists; without one, the length of the first list of dicts, strings or numbers. `batch_size=` says
   the number instead.
2. Tensors with that first dimension and lists with that length are split. The batch itself may be a
   list or tuple of its parts, as `DataLoader` yields it.
3. Tensors without dimensions or with one row, and all other values, are passed on whole. So is what
   `static=` names.
4. A tensor with another first dimension is an error: it misses a row, or belongs into `static=`.
5. In a run, the first batch decides what each leaf is (`Roles`).
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Number
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from wholebatch.batch.roles import Roles
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
    name: str,
    node: Any,
    is_leaf: Callable[[str, Any], bool] | None,
    leaves: list[Leaf],
) -> Structure:
    # Not a nested function of `flatten`: a recursive closure is a reference cycle, which would keep
    # the batch's tensors alive until garbage collection.
    inner = children(node)
    if inner is None or (is_leaf is not None and is_leaf(name, node)):
        leaves.append(Leaf(name, node))
        return _LEAF
    return Structure(
        node,
        tuple([_visit(join(name, key), value, is_leaf, leaves) for key, value in inner]),
    )


def join(name: str, key: str) -> str:
    """Return the dotted name of the child `key` of `name`; the whole batch has the name ''."""
    return f"{name}.{key}" if name else key


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the named children of a container, or None for a leaf."""
    if isinstance(node, Tensor):
        return None  # By far the most common case, and the tests below are slow.
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
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
    names = _field_names(node)
    changed = [
        (name, new)
        for name, new in zip(names, values, strict=True)
        if getattr(node, name) is not new
    ]
    if not changed:
        return node
    # Not dataclasses.replace: it runs __init__ again and loses init=False fields.
    copied = copy.copy(node)
    for name, new in changed:
        object.__setattr__(copied, name, new)  # Works for frozen dataclasses too.
    return copied


def _rebuild_mapping(node: Mapping[Any, Any], values: list[Any]) -> Any:
    items = dict(zip(node, values, strict=True))
    if not isinstance(node, MutableMapping):
        return type(node)(items)  # type: ignore[call-arg]
    copied = copy.copy(node)
    for key, new in items.items():
        old = node[key]
        if old is new:
            continue
        copied[key] = new
        if node[key] is new:  # the copy shares its items with the caller's batch
            copied[key] = old
            raise SplitError(
                f"a batch of type {type(node).__name__}: its copy.copy() shares its items with the "
                "original; give the class a __copy__ that copies them, or pass a dict"
            )
    return copied


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
    if value.layout == torch.strided and not value.is_pinned():
        # A copy from pageable memory always blocks the host. The pinned block is released only
        # after the copy: PyTorch's host allocator marks it with an event.
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


# Hints about the batch that callers of `split` may give.
BatchSize = int | Callable[[Any], int] | None
Static = str | Iterable[str]
Rows = slice | list[int]

_BATCH_SIZE = "must be a positive number of samples, or a function of the batch that returns it"


@dataclass(frozen=True)
class Layout:
    """The number of samples of a batch, and its leaves."""

    size: int
    leaves: tuple[Leaf, ...]
    structure: Structure
    roles: Roles | None = None
    """What the leaves were in the run's batches before; None for a batch by itself."""

    def take(self, rows: Rows) -> Any:
        """Return a batch of the samples `rows`: views for a slice, copies for a list of indices."""
        return self.structure.build(
            [take(leaf.value, rows) if leaf.batched else leaf.value for leaf in self.leaves]
        )

    def parts(self, samples: int) -> list[tuple[Any, Sequence[int]]]:
        """Return micro-batches of so many samples, each with its samples' places in the batch."""
        rows = range(self.size)
        return [
            (self.take(slice(start, start + samples)), rows[start : start + samples])
            for start in rows[::samples]
        ]


def batch_size_of(
    batch: Any, *, batch_size: BatchSize = None, static: Static = (), roles: Roles | None = None
) -> int:
    """Return the number of samples in `batch`, determined as `split` does.

    >>> batch_size_of({"x": torch.ones(6, 2), "y": torch.ones(6), "temperature": 0.5})
    6
    """
    return layout_of(batch, batch_size=batch_size, static=static, roles=roles).size


def layout_of(
    batch: Any,
    *,
    batch_size: BatchSize = None,
    static: Static = (),
    roles: Roles | None = None,
) -> Layout:
    """Return which leaves of `batch` hold samples, and how many samples there are.

    `roles` are those of the run's batches before; this batch adds to them.
    """
    fixed = frozenset(_names(static))
    if batch_size is None:
        size, source = _count_samples(batch, fixed)
    else:
        size, source = _declared(batch, batch_size), "batch_size="
    if size == 0:
        raise SplitError("the batch has no samples: skip it, or check the loader that yields it")

    def is_leaf(name: str, node: Any) -> bool:
        if name in fixed:
            return True
        if not name and batch_size is None:
            return source == ""
        if not _is_list(node):
            return False
        return _is_split(name, len(node), size, roles, lambda: _fits(name, node, size))

    flat, structure = flatten(batch, is_leaf)
    if missing := fixed - {leaf.name for leaf in flat}:
        names = ", ".join(leaf.name for leaf in flat) or "none"
        raise SplitError(f"static={min(missing)!r}: the batch has no such leaf; it has {names}")
    leaves = tuple(leaf if leaf.name in fixed else _judged(leaf, size, roles) for leaf in flat)
    arrays = [leaf for leaf in leaves if leaf.name not in fixed and is_array(leaf.value)]
    _refuse_other_rows(size, source, arrays)
    if not any(leaf.batched for leaf in leaves):
        raise SplitError(
            f"batch_size={size}: no tensor of the batch has {size} rows, and no list has {size} "
            f"items; the batch has {', '.join(map(_described, leaves)) or 'nothing'}"
        )
    return Layout(size, leaves, structure, roles)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a structure, in their order; none if it cannot be read."""
    try:
        return [leaf.value for leaf in flatten(tree)[0] if isinstance(leaf.value, Tensor)]
    except Exception:  # an object that cannot be taken apart
        return []


def readable_layout(
    batch: Any, batch_size: BatchSize, static: Static, roles: Roles | None = None
) -> Layout | None:
    """Return the layout of a batch; None if its rows are not known to be samples."""
    try:
        return layout_of(batch, batch_size=batch_size, static=static, roles=roles)
    except SplitError:
        return None


def check_layout(batch_size: object, static: object) -> None:
    """Refuse options that are invalid for every batch, before there is one."""
    if batch_size is not None and not callable(batch_size) and not is_positive(batch_size):
        raise OptionError(f"batch_size={batch_size!r}: {_BATCH_SIZE}")
    _names(static)


def take(value: Any, rows: Rows) -> Any:
    """Return the samples `rows` of one leaf that has a batch dimension."""
    if isinstance(value, Tensor):
        if isinstance(rows, slice):
            return value[rows]
        return value.index_select(0, torch.tensor(rows, device=value.device))
    if is_array(value):
        return value[rows]
    picked = value[rows] if isinstance(rows, slice) else [value[row] for row in rows]
    return picked if type(picked) is type(value) else type(value)(picked)


def is_positive(value: Any) -> bool:
    """True if an option is a positive whole number (True itself is not one)."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _names(static: object) -> tuple[str, ...]:
    names = (static,) if isinstance(static, str) or not isinstance(static, Iterable) else (*static,)
    if not all(isinstance(name, str) and name for name in names):
        raise OptionError(f"static={static!r}: must be names of leaves, such as 'class_weights'")
    return names


def _declared(batch: Any, batch_size: int | Callable[[Any], int]) -> int:
    size = batch_size(batch) if callable(batch_size) else batch_size
    if not is_positive(size):
        raise OptionError(f"batch_size={size!r}: {_BATCH_SIZE}")
    return int(size)


def _count_samples(batch: Any, fixed: frozenset[str]) -> tuple[int, str]:
    """Return the number of samples, and the name of the leaf it comes from."""
    if isinstance(batch, (list, tuple)) and not batch:
        return 0, ""
    if _is_list_of_samples(batch):
        return len(batch), ""
    lists = []
    for name, node in _outside_lists("", batch, fixed):
        if is_array(node) and node.ndim > 0:
            return int(node.shape[0]), name
        if _is_list_of_samples(node):
            lists.append((len(node), name))
    if lists:
        return lists[0]
    raise SplitError(
        f"the number of samples is not known: the batch (a {type(batch).__name__}) has no tensor "
        "with a first dimension outside of lists, and no list of dicts, strings or numbers. Give a "
        "dict, a tuple or a dataclass of tensors (of a loader, each batch), or the number: "
        f"{_as_options('batch_size=lambda batch: ...')}"
    )


def _as_options(hint: str) -> str:
    """Return how `WholeBatch` and how `split` take an option about the batch."""
    return f"micro_batch=wb.samples(..., {hint}) in WholeBatch, {hint} in wb.split"


def _outside_lists(name: str, node: Any, fixed: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves, lists and tuples of a batch, without what is in a list or tuple."""
    if name in fixed:
        return
    _refuse_unsplittable(name, node)
    inner = children(node)
    if inner is None or (name and isinstance(node, (list, tuple)) and not is_record(node)):
        yield name, node
        return
    for key, value in inner:
        yield from _outside_lists(join(name, key), value, fixed)


def _is_list_of_samples(node: Any) -> bool:
    """True for a list of strings, numbers, lists of numbers, or records with the same names."""
    if not _is_list(node):
        return False
    items = [item for item in node if item is not None]
    if items and all(map(is_record, items)):
        names = [name for name, _ in children(items[0]) or ()]
        return all([name for name, _ in children(item) or ()] == names for item in items)
    return bool(items) and all(
        isinstance(item, (str, bytes, Number))
        or (isinstance(item, list) and all(isinstance(number, Number) for number in item))
        for item in items
    )


def _is_list(node: Any) -> bool:
    """True for a list or tuple, but not for a record or a size such as (224, 224)."""
    if not isinstance(node, (list, tuple)) or is_record(node):
        return False
    return isinstance(node, list) or not all(isinstance(item, Number) for item in node)


def _is_split(
    name: str, entries: int, size: int, roles: Roles | None, fits: Callable[[], bool]
) -> bool:
    """True if a leaf has one entry per sample: by its role in the run, else by this batch."""
    if roles is None or not name or not entries:
        return fits()
    return roles.is_split(name, entries, size, fits)


def _fits(name: str, node: Any, size: int) -> bool:
    """True if the container `node` may be a list of samples, which is not taken apart further."""
    if len(node) != size:
        return False
    arrays = [leaf.value for leaf in flatten(node)[0] if is_array(leaf.value)]
    rows = {array.shape[0] for array in arrays if array.ndim}
    first = next((item for item in node if item is not None), None)
    if size == 1 or is_record(first) or rows != {size}:
        return True
    if isinstance(node, tuple) or not name:
        return False
    raise SplitError(
        f"the list {name!r} has {size} items, and each has a first dimension of {size}: make it a "
        "tuple if they are parts of the batch, or a list of dicts if they are samples"
    )


def _judged(leaf: Leaf, size: int, roles: Roles | None) -> Leaf:
    """Return the leaf, marked if it has one row or item for each sample."""
    name, value = leaf.name, leaf.value
    _refuse_unsplittable(name, value)
    if value is None or isinstance(value, (list, tuple)):  # a list that is a leaf holds samples
        return Leaf(name, value, value is not None)
    rows = int(value.shape[0]) if is_array(value) and value.ndim else 1
    fits = is_array(value) and value.ndim > 0 and rows == size
    if rows in (1, size):  # with other rows it is refused
        fits = _is_split(name, rows, size, roles, lambda: fits)
    return Leaf(name, value, fits)


def _refuse_other_rows(size: int, source: str, arrays: Sequence[Leaf]) -> None:
    """Refuse tensors with another number of rows; one row is shared by all samples."""
    rows = [leaf.value.shape[0] for leaf in arrays if leaf.value.ndim]
    if size == 1 and (rows.count(1) != 1 or source == "batch_size="):
        return  # one sample, and tensors beside it
    for leaf in arrays:
        if leaf.value.ndim and leaf.value.shape[0] not in (1, size):
            is_counted = source != "batch_size="
            names = {source: 0, leaf.name: 0} if is_counted else {leaf.name: 0}
            static = " or ".join(f"static={name!r}" for name in names)
            counted = f"{source!r} has" if is_counted else "batch_size= says"
            raise SplitError(
                f"{counted} {size} rows, and {leaf.name!r} has {leaf.value.shape[0]}: each tensor "
                "of a batch needs one row for each sample. What is not a value per sample is "
                f"named, {_as_options(static)}; for one sample say batch_size=1"
            )


def _described(leaf: Leaf) -> str:
    if is_array(leaf.value):
        return f"{leaf.name!r} {tuple(leaf.value.shape)}"
    return f"{leaf.name!r} (a {type(leaf.value).__name__})"


def _refuse_unsplittable(name: str, value: Any) -> None:
    what = f"the leaf {name!r}" if name else "the batch"
    if isinstance(value, PackedSequence):
        raise SplitError(
            f"{what} is a PackedSequence, which interleaves its samples by time step: give the "
            "padded tensor and its lengths, and pack inside the loss function"
        )
    if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
        kind = "nested (jagged)" if value.is_nested else str(value.layout)
        raise SplitError(
            f"{what} is a {kind} tensor, whose rows are no views: give a dense or padded tensor "
            "with a mask, or a list of tensors"
        )
