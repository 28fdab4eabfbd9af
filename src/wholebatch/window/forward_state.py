"""Everything besides gradients that a forward may change, to restore or to compare.

A window that begins again (out of memory, a replay) must find what the first try found. A forward
moves BatchNorm's running statistics, buffers and attributes of the user's own modules, and random
generators. A buffer may be changed in place or replaced (`self.seen = self.seen + len(x)`): the
tensor that was there is put back, with the value that it had.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import StateError

_IMMUTABLE = frozenset({int, float, bool, complex, str, bytes, type(None)})
_CONTAINERS = (list, tuple, dict, deque)
_BASES: tuple[Any, ...] = (dict, list, tuple, deque, set)
_MUTABLE = (*_CONTAINERS, Tensor, set)
# Attributes that are not the model's state. The last is Transformers' note that hooks which record
# outputs are in place: those stay, and without the note they would be installed twice.
_TORCHS = frozenset({*vars(nn.Module()), "_output_capturing_hooks_installed"})
# Wrappers keep the books of their engine in attributes; those are not the model's.
_WRAPPERS = (
    "torch.nn.parallel.",
    "torch.distributed.",
    "torch._dynamo.",
    "deepspeed.",
    "accelerate.",
    "lightning.fabric.",
    "lightning_fabric.",
)
_LARGE = 1 << 24
_MANY = 256
_DEEP = 3


@dataclass(slots=True)
class Kept:
    """A value with a copy of what it held; a container's copy is a dict of kept values.

    `is_flat`: the container holds numbers and strings only, and its copy is one like it.
    """

    found: Any
    copy: Any
    returns: bool = True
    is_flat: bool = False

    def entries(self) -> dict[Any, Kept]:
        """Return what a container held, by key or place."""
        if not self.is_flat:
            held: dict[Any, Kept] = self.copy
            return held
        return {key: Kept(value, value) for key, value in _pairs(self.copy)}


@dataclass(slots=True)
class Item:
    """One buffer or attribute of a module, as it was."""

    module: nn.Module
    name: str
    is_buffer: bool
    kept: Kept


Key = tuple[int, str]
"""A module, by its id, and the name of a buffer or attribute of it."""


class ForwardState:
    """Copies of the buffers and plain attributes of modules, and of the random generators.

    Attributes are those that hold numbers, strings, tensors, arrays, or containers of them; other
    objects are left alone. A tensor that is part of a graph is a result of the last forward: it is
    not put back, and only kept to be compared (`results=True`). An attribute of more than 16 MiB is
    held and not copied. As a context, it puts everything back at its end.
    """

    def __init__(
        self,
        *models: nn.Module,
        results: bool = False,
        every: bool = True,
        attributes: bool = True,
        generators: Sequence[Any] = (),
    ) -> None:
        """`every=False` leaves out Python's and NumPy's generators, as `capture_random`.

        `generators` are the user's own random generators, beside the global ones.

        `attributes=False`: `read_attributes` copies them, before code that may change them runs. A
        recorded graph changes none.
        """
        self._modules = list(dict.fromkeys(m for model in models for m in model.modules()))
        # Every window makes one: what needs no copy is only listed here, and read in `items`.
        self._found: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
            (module, dict(module._buffers), {}) for module in self._modules
        ]
        self._copies: dict[Key, Kept] = {}
        self._results = results
        self._has_attributes = False
        if attributes:
            self.read_attributes()
        # One operation copies all buffers of a dtype: a model with BatchNorms has hundreds of them.
        together: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for module, buffers, _ in self._found:
            for name, value in buffers.items():
                if (
                    type(value) is Tensor
                    and value.layout is torch.strided
                    and not value.requires_grad
                ):
                    copies, found = together.setdefault((value.dtype, value.device), ([], []))
                    copies.append(torch.empty_like(value))
                    found.append(value)
                    self._copies[id(module), name] = Kept(value, copies[-1])
                elif value is not None and not nn.parameter.is_lazy(value):
                    kept = _kept(value, _DEEP, whole=True, results=results)
                    self._copies[id(module), name] = kept
        for copies, found in together.values():
            torch._foreach_copy_(copies, found)
        self.random = capture_random(every=every)
        self._generators = [(one, state_of(one)) for one in generators]

    def read_attributes(self) -> None:
        """Copy the attributes, unless that is done."""
        if self._has_attributes:
            return
        found, copies = [], {}
        for module, buffers, _ in self._found:
            attributes = {} if _is_wrapper(module) else dict(vars(module))
            found.append((module, buffers, attributes))
            for name in attributes.keys() - _TORCHS:
                value = attributes[name]
                if not _is_fixed(value) and _is_plain(value):
                    copies[id(module), name] = _kept(value, _DEEP, results=self._results)
        self._found, self._has_attributes = found, True  # not if memory ran out meanwhile
        self._copies.update(copies)
        vars(self).pop("items", None)

    @cached_property
    def items(self) -> dict[Key, Item]:
        """The buffers and plain attributes, as they were."""
        found: dict[Key, Item] = {}
        for module, *parts in self._found:
            for is_buffer, values in zip((True, False), parts, strict=True):
                for name, value in values.items():
                    key = (id(module), name)
                    kept = self._copies.get(key)
                    if kept is None and _is_fixed(value) and (is_buffer or name not in _TORCHS):
                        kept = Kept(value, value, is_flat=True)
                    if kept is not None:
                        found[key] = Item(module, name, is_buffer, kept)
        return found

    def __enter__(self) -> ForwardState:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    @torch.no_grad()
    def restore(self, *, only: Collection[Key] | None = None, random: bool = True) -> None:
        """Put everything back; given `only`, these items, results too, and no random generator.

        `random=False`: nothing was drawn, so that the random generators are left as they are.
        """
        for module in self._modules:
            for name in list(_plain(module, attributes=self._has_attributes)):
                key = (id(module), name)
                if key not in self.items and (only is None or key in only):
                    module.__dict__.pop(name, None)
                    module._buffers.pop(name, None)
        for key, item in self.items.items():
            if only is None or key in only:
                _put_back(item, results=only is not None)
        if only is None and random:
            restore_random(self.random)
            for generator, state in self._generators:
                set_state_of(generator, state)

    def draws_same(self, other: ForwardState, *, host: bool) -> bool:
        """True if torch's generators are at the same place; with `host`, Python's and NumPy's."""
        names = [name for name in self.random if (name in ("python", "numpy")) == host]
        own = zip(self._generators, other._generators, strict=False)
        return all(same_random(self.random[n], other.random.get(n)) for n in names) and all(
            same_random(was, now)
            for (one, was), (_, now) in own
            if isinstance(one, torch.Generator) != host
        )

    def moved(self, after: ForwardState) -> list[Key]:
        """Return the items that `after` has with another value, or that only one of both has."""
        return [key for key in {**self.items, **after.items} if not self.is_same(after, key)]

    def is_same(self, other: ForwardState, key: Key, tolerance: float = 0.0) -> bool:
        """True if an item has the same value in both, tensors up to a relative tolerance."""
        mine, theirs = self.items.get(key), other.items.get(key)
        if mine is None or theirs is None:
            return mine is theirs
        return _equal(mine.kept, theirs.kept, tolerance)

    def value(self, key: Key) -> Any:
        """Return the copy of an item that is no container; None if it is not there."""
        item = self.items.get(key)
        return None if item is None else item.kept.copy


def _plain(module: nn.Module, *, attributes: bool) -> Iterator[str]:
    """Yield the names of the buffers and, with `attributes`, of the plain attributes."""
    for name, value in module._buffers.items():
        if value is None or not nn.parameter.is_lazy(value):
            yield name
    if attributes and not _is_wrapper(module):
        for name, value in vars(module).items():
            if name not in _TORCHS and _is_plain(value):
                yield name


def _is_fixed(value: Any) -> bool:
    """True for a value that nothing can change in place: a number, a string, a tuple of them."""
    kind = type(value)
    return kind in _IMMUTABLE or (kind is tuple and _IMMUTABLE.issuperset(map(type, value)))


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_WRAPPERS)


def _is_plain(value: Any) -> bool:
    kind = type(value)  # isinstance is slow for a Generator
    if kind in _IMMUTABLE or kind is torch.Generator:
        return True
    return isinstance(value, _MUTABLE) or _is_array(value)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _kept(value: Any, depth: int, *, whole: bool = False, results: bool = True) -> Kept:
    if _is_fixed(value):
        return Kept(value, value, is_flat=True)
    if isinstance(value, Tensor):
        return _kept_tensor(value, whole=whole, results=results)
    if type(value) is torch.Generator:
        return Kept(value, value.get_state())
    if isinstance(value, set):
        return Kept(value, copy_of(value))
    if _is_array(value):
        return Kept(value, value.copy())
    if isinstance(value, _CONTAINERS):
        values = dict.values(value) if isinstance(value, dict) else value
        if _IMMUTABLE.issuperset(map(type, values)):
            return Kept(value, copy_of(value), True, True)
        deep = depth > 0 and len(value) <= _MANY
        held = _pairs(value)
        return Kept(value, {k: _kept(v, depth - 1) if deep else Kept(v, None) for k, v in held})
    return Kept(value, value)


def _pairs(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, OrderedDict):
        return OrderedDict.items(container)
    return dict.items(container) if isinstance(container, dict) else enumerate(container)


def _kept_tensor(value: Tensor, *, whole: bool, results: bool) -> Kept:
    if value.grad_fn is not None:
        alias = value.detach() if results else None
        return Kept(alias, alias, returns=False)
    large = not whole and value.numel() * value.element_size() > _LARGE
    if large or isinstance(value, nn.Parameter):
        return Kept(value, value.detach(), returns=False)
    return Kept(value, value.detach().clone())


def _equal(a: Kept, b: Kept, tolerance: float) -> bool:
    if type(a.found) is not type(b.found):
        return False
    x, y = a.copy, b.copy
    if isinstance(x, Tensor):
        return _close(x, y, tolerance)
    if _is_array(x):
        return bool(x.shape == y.shape and x.dtype == y.dtype and (x == y).all())
    if isinstance(a.found, _CONTAINERS) and x is not None:
        x, y = a.entries(), b.entries()
        return x.keys() == y.keys() and all(_equal(x[key], y[key], tolerance) for key in x)
    if isinstance(x, (float, complex)):
        near = abs(x - y) <= tolerance * max(abs(x), abs(y))
        return bool(x == y or near or (x != x and y != y))
    if isinstance(a.found, set) or type(a.found) in _IMMUTABLE:
        return bool(x == y)
    return a.found is b.found


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if torch.equal(a, b):
        return True
    if not a.is_floating_point() or a.layout is not torch.strided:
        return False
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).max()
    largest = torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, posinf=0.0).max()
    return bool(gap <= tolerance * largest)


def _put_back(item: Item, *, results: bool) -> None:
    if not results and not item.kept.returns and item.kept.found is item.kept.copy:
        return  # a result of a forward
    found, module, name = _restored(item.kept), item.module, item.name
    held, other = module._buffers, module.__dict__
    if not item.is_buffer:
        held, other = other, held
    other.pop(name, None)
    if name not in held or held[name] is not found:
        held[name] = found


def _restored(kept: Kept) -> Any:
    """Return the object that was found, with the values that it had."""
    found, copy = kept.found, kept.copy
    if copy is None or not kept.returns or type(found) in _IMMUTABLE:
        return found
    if isinstance(found, Tensor):
        if found.shape != copy.shape:  # resized in place
            found.data = copy.clone()
        else:
            found.copy_(copy)
    elif type(found) is torch.Generator:
        found.set_state(copy)
    elif _is_array(found):
        found[...] = copy
    elif isinstance(found, set):
        refill(found, copy)
    elif isinstance(found, _CONTAINERS):
        values = {key: _restored(value) for key, value in kept.entries().items()}
        refill(found, values if isinstance(found, dict) else list(values.values()))
    return found


def copy_of(container: Any) -> Any:
    """Return what a container of the user's holds, as one of the base type."""
    if isinstance(container, dict):
        return dict(_pairs(container))
    return set(container) if isinstance(container, set) else list(container)


def refill(container: Any, values: Any) -> None:
    """Make a container hold these values again, if it does not.

    It is written by its base type: the methods of a class of the user's may do more, or refuse.
    """
    if _holds(container, values):
        return
    base = next(kind for kind in (OrderedDict, *_BASES) if isinstance(container, kind))
    if base is tuple:
        return
    base.clear(container)
    if issubclass(base, dict):
        for key, value in values.items():
            base.__setitem__(container, key, value)
    else:
        (set.update if base is set else base.extend)(container, values)


def _holds(container: Any, values: Any) -> bool:
    """True if a container holds these very objects, in this order."""
    if isinstance(container, set):
        return bool(set(container) == values)
    now, before = list(_pairs(container)), list(_pairs(values))
    return len(now) == len(before) and all(
        key == other and value is was
        for (key, value), (other, was) in zip(now, before, strict=True)
    )


@contextmanager
def attributes_restored(owner: object) -> Iterator[None]:
    """Put back the attributes of an object, and the contents of small containers among them."""
    own = vars(owner)
    held = dict(own)
    containers = (value for value in held.values() if isinstance(value, (*_CONTAINERS, set)))
    contents = [_kept(value, _DEEP) for value in containers]
    try:
        yield
    finally:
        for kept in contents:
            _restored(kept)
        own.clear()
        own.update(held)


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


def in_backward() -> bool:
    """True if a backward runs on this thread: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


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
    return bool((a == b).all()) if _is_array(a) else bool(a == b)
