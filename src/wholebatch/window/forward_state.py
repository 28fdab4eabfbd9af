"""The state of a model beside its weights: to put it back after a forward, or to see a change.

A window that begins again (out of memory, a replay) must find what the first try found. A forward
moves BatchNorm's running statistics, buffers and attributes of the user's own modules, and random
generators. Buffers and generators are put back exactly. An attribute is put back if it is a
number, a string, a tensor, an array, a generator or a container of such values: it is compared
first, and only what has changed is written. Objects of other classes are left alone.

`ModelParts` compares what no forward changes: the modules themselves, and their hooks.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.errors import StateError

_NUMBERS = (int, float, str, NoneType)
_IMMUTABLE = frozenset({int, float, bool, complex, str, bytes, type(None)})
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, tuple, deque, set)
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
_MISSING = object()
_LARGE = 1 << 24
_MANY = 256
_DEEP = 3

Key: TypeAlias = tuple[int, str]
"""A module, by its id, and the name of a buffer or attribute of it."""


@dataclass(slots=True, eq=False)
class Copied:
    """An object that may change in place, with a copy of what it held.

    What nothing can change (a number, a string) is kept as it is, without a `Copied`.
    """

    object: Any
    held: Any
    """A container's is a dict by key or place. The object itself, if only its identity counts."""
    is_written: bool = True
    """False if the object is put back without what it held: a parameter, a large tensor."""
    is_result: bool = False
    """True for a result of the last forward, which is only kept to be compared."""


class ForwardState:
    """Copies of the buffers and plain attributes of modules, and of the random generators.

    A tensor that is part of a graph is a result of the last forward: it is not put back, and only
    kept to be compared (`results=True`). An attribute of more than 16 MiB is held and not copied.
    As a context, it puts everything back at its end.
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
        self._modules = {id(module): module for model in models for module in model.modules()}
        self._buffers: dict[Key, Any] = {}
        self._attributes: dict[Key, Any] = {}
        self._results = results
        self._has_attributes = False
        if attributes:
            self.read_attributes()
        # One operation copies all buffers of a dtype: a model with BatchNorms has hundreds of them.
        alike: dict[Any, list[Copied]] = {}
        for place, module in self._modules.items():
            for name, value in module._buffers.items():
                if type(value) is Tensor and value.layout is torch.strided and not value.grad_fn:
                    copied = Copied(value, torch.empty_like(value, requires_grad=False))
                    self._buffers[place, name] = copied
                    alike.setdefault((value.dtype, value.device), []).append(copied)
                elif value is None or not nn.parameter.is_lazy(value):
                    self._buffers[place, name] = _copied(value, whole=True, results=results)
        with torch.no_grad():
            for buffers in alike.values():
                torch._foreach_copy_([it.held for it in buffers], [it.object for it in buffers])
        self.random = capture_random(every=every)
        self._generators = [(generator, state_of(generator)) for generator in generators]

    def read_attributes(self) -> None:
        """Copy the attributes, unless that is done."""
        if not self._has_attributes:
            self._attributes = {
                (place, name): _copied(value, results=self._results)
                for place, module in self._modules.items()
                for name, value in _plain_attributes(module)
            }
            self._has_attributes = True  # not if memory ran out meanwhile

    def module_of(self, key: Key) -> nn.Module | None:
        """Return the module of an item; None if the item is not there."""
        return None if self._copy_of(key) is _MISSING else self._modules[key[0]]

    def _copy_of(self, key: Key) -> Any:
        return self._buffers.get(key, self._attributes.get(key, _MISSING))

    def __enter__(self) -> ForwardState:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    @torch.no_grad()
    def restore(self, *, only: Collection[Key] | None = None, random: bool = True) -> None:
        """Put everything back; given `only`, these items, results too, and no random generator.

        `random=False`: nothing was drawn, so that the random generators are left as they are.
        """
        for place, module in self._modules.items():
            names = {*module._buffers}
            if self._has_attributes:
                names.update(name for name, _ in _plain_attributes(module))
            for name in names:
                key = (place, name)
                if self._copy_of(key) is _MISSING and (only is None or key in only):
                    module.__dict__.pop(name, None)
                    module._buffers.pop(name, None)
        for copies in (self._buffers, self._attributes):
            for key, value in copies.items():
                if only is None or key in only:
                    self._put_back(key, value, results=only is not None)
        if only is None and random:
            restore_random(self.random)
            for generator, was in self._generators:
                set_state_of(generator, was)

    def _put_back(self, key: Key, value: Any, *, results: bool) -> None:
        """Let a module hold what it held under this name; a result only where it is wanted."""
        if isinstance(value, Copied) and value.is_result and not results:
            return
        module, name = self._modules[key[0]], key[1]
        is_buffer = key in self._buffers
        value = _restored(value, compares=not is_buffer)
        home, other = module._buffers, module.__dict__
        if not is_buffer:
            home, other = other, home
        other.pop(name, None)
        if name not in home or home[name] is not value:
            home[name] = value

    def draws_same(self, other: ForwardState, *, host: bool) -> bool:
        """True if torch's generators are at the same place; with `host`, Python's and NumPy's."""
        names = [name for name in self.random if (name in ("python", "numpy")) == host]
        own = zip(self._generators, other._generators, strict=False)
        return all(same_random(self.random[n], other.random.get(n)) for n in names) and all(
            same_random(was, now)
            for (generator, was), (_, now) in own
            if isinstance(generator, torch.Generator) != host
        )

    def moved(self, after: ForwardState) -> list[Key]:
        """Return the items that `after` has with another value, or that only one of both has."""
        keys = (*self._buffers, *self._attributes, *after._buffers, *after._attributes)
        return [key for key in dict.fromkeys(keys) if not self.is_same(after, key)]

    def is_same(self, other: ForwardState, key: Key, tolerance: float = 0.0) -> bool:
        """True if an item has the same value in both, tensors up to a relative tolerance."""
        return _equal(self._copy_of(key), other._copy_of(key), tolerance)

    def value(self, key: Key) -> Any:
        """Return the copy of an item; None if it is not there."""
        value = self._copy_of(key)
        if value is _MISSING:
            return None
        return value.held if isinstance(value, Copied) else value


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that can be copied and put back."""
    if not type(module).__module__.startswith(_WRAPPERS):
        for name, value in vars(module).items():
            if name not in _TORCHS and _is_plain(value):
                yield name, value


def _is_fixed(value: Any) -> bool:
    """True for a value that nothing can change in place: a number, a string, a tuple of them."""
    kind = type(value)
    return kind in _IMMUTABLE or (kind is tuple and _IMMUTABLE.issuperset(map(type, value)))


def _is_plain(value: Any) -> bool:
    kind = type(value)  # most attributes are modules or numbers, and isinstance of Tensor is slow
    if kind in _IMMUTABLE:
        return True
    if kind is list and any(isinstance(item, nn.Parameter) for item in value):
        return False  # An LSTM's own list of its weights: an engine that shards them replaces it.
    return issubclass(kind, (Tensor, *_BASES)) or is_array(value) or is_generator(value)


def _copied(value: Any, depth: int = _DEEP, *, whole: bool = False, results: bool = True) -> Any:
    """Return a value that nothing can change, or a `Copied`."""
    if _is_fixed(value):
        return value
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            alias = value.detach() if results else None
            return Copied(alias, alias, is_result=True)
        large = not whole and value.numel() * value.element_size() > _LARGE
        if large or isinstance(value, nn.Parameter):
            return Copied(value, value.detach(), is_written=False)
        return Copied(value, value.detach().clone())
    if is_generator(value):
        return Copied(value, state_of(value))
    if is_array(value):
        return Copied(value, value.copy())
    if isinstance(value, set):
        return Copied(value, set(value))
    if not isinstance(value, _BASES):
        return Copied(value, value, is_written=False)
    held = dict(_pairs(value))
    if not _IMMUTABLE.issuperset(map(type, held.values())):
        copies = depth > 0 and len(held) <= _MANY
        for key, inner in held.items():
            fixed = _is_fixed(inner) or copies
            held[key] = (
                _copied(inner, depth - 1) if fixed else Copied(inner, inner, is_written=False)
            )
    return Copied(value, held)


def _pairs(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, OrderedDict):
        return OrderedDict.items(container)
    return dict.items(container) if isinstance(container, dict) else enumerate(container)


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    """True if two copies hold the same; numbers up to a relative tolerance."""
    x, y = (it.held if isinstance(it, Copied) else it for it in (a, b))
    if type(a) is not type(b) or type(x) is not type(y):
        return False
    if isinstance(a, Copied) and type(a.object) is not type(b.object):
        return False
    if isinstance(x, Tensor):
        return _close(x, y, tolerance)
    if is_array(x):
        return bool(x.shape == y.shape and x.dtype == y.dtype and (x == y).all())
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_equal(x[key], y[key], tolerance) for key in x)
    if isinstance(x, tuple):
        return len(x) == len(y) and all(map(partial(_equal, tolerance=tolerance), x, y))
    if isinstance(x, (float, complex)):
        near = abs(x - y) <= tolerance * max(abs(x), abs(y))
        return bool(x == y or near or (x != x and y != y))
    return bool(x == y) if type(x) in _IMMUTABLE or type(x) is set else x is y


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


def _restored(value: Any, *, compares: bool = True) -> Any:
    """Return the object that was copied, with the values that it had.

    A buffer is written without a comparison, which would wait for the device.
    """
    if not isinstance(value, Copied):
        return value
    it, held = value.object, value.held
    if value.is_result or not value.is_written:
        return it
    if isinstance(it, Tensor):
        if it.shape != held.shape:  # resized in place
            it.data = held.clone()
        elif not (compares and it.dtype is held.dtype and torch.equal(it, held)):
            it.copy_(held)
    elif is_generator(it):
        set_state_of(it, held)
    elif is_array(it):
        if not _equal(it, held, 0.0):
            it[...] = held
    elif isinstance(it, set):
        refill(it, held)
    else:
        values = {key: _restored(inner) for key, inner in held.items()}
        refill(it, values if isinstance(it, dict) else list(values.values()))
    return it


def copy_of(container: Any) -> Any:
    """Return what a container of the user's holds, as one of the base type."""
    if isinstance(container, dict):
        return dict(_pairs(container))
    return set(container) if isinstance(container, set) else list(container)


def refill(container: Any, values: Any) -> None:
    """Make a container hold these values again, if it does not.

    It is written by its base type: the methods of a class of the user's may do more, or refuse.
    """
    base = next(kind for kind in _BASES if isinstance(container, kind))
    if base is tuple or _holds(container, values):
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
    before = dict(own)
    contents = [_copied(value) for value in before.values() if isinstance(value, _BASES)]
    try:
        yield
    finally:
        for container in contents:
            _restored(container)
        own.clear()
        own.update(before)


class ModelParts:
    """The modules of a model with their hooks, as they were when this object was made.

    With `numbers`, the numbers and strings among their attributes too. It is compared at each
    window or micro-step, while a GPU waits: so there are few steps of Python per module.
    """

    def __init__(self, model: nn.Module, *, numbers: bool = False) -> None:
        modules = [vars(module) for module in model.modules()]
        parts = [
            part
            for fields in modules
            for name, part in fields.items()
            if name == "_modules" or (name.endswith("_hooks") and isinstance(part, dict))
        ]
        self._empty = [part for part in parts if not part]
        self.filled = [(part, list(part.items())) for part in parts if part]
        """The dictionaries that are not empty, with what they held."""
        self._ids = set(map(id, parts))
        self._numbers = []
        for fields in modules if numbers else ():
            names = [name for name, value in fields.items() if isinstance(value, _NUMBERS)]
            read = partial(self._read, fields, names)
            self._numbers.append((read, read()))

    @staticmethod
    def _read(fields: dict[str, Any], names: list[str]) -> list[Any]:
        return [len(fields), *map(fields.get, names)]

    def hold(self) -> bool:
        """True if all of it is as it was."""
        try:
            return (
                not any(self._empty)
                and all([*part.items()] == before for part, before in self.filled)
                and all(read() == before for read, before in self._numbers)
            )
        except (RuntimeError, ValueError):  # a number has become a tensor or an array
            return False

    def include(self, part: Any) -> bool:
        """True if `hold` compares this dictionary of modules or hooks."""
        return id(part) in self._ids


# ------------------------------------------------------------ random generators


def is_array(value: Any) -> bool:
    """True for a NumPy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_generator(value: Any) -> bool:
    """True for a random generator: torch's, Python's or NumPy's."""
    if isinstance(value, (torch.Generator, random.Random)):  # no union: made anew in each call
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
    return bool((a == b).all()) if is_array(a) else bool(a == b)
