"""The Python state that a traced graph depends on: read values must stay, writes are refused.

Tracing runs the Python of the model and of the loss function once, and every value it reads becomes
a constant of the graph. That Python does not run again. So the values in sight (an annealed weight,
`training`, a global number) are compared at every window, and if one has changed, the graph is
traced again. Writes (a list that grows, a counter) would happen only once: they are undone, and
refused.

In sight are the attributes of modules, closures, defaults, the globals that the code names, the
attributes of objects among these, and what containers hold. A value from elsewhere (a class, an
imported Python module, a file) is noticed when the graph is compared with eager code, in windows 2,
4, 8, 16, …
"""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.value_reads import SMALL
from wholebatch.window.forward_state import (
    capture_python_random,
    copy_of,
    own_generators,
    refill,
    restore_random,
    same_random,
    set_state_of,
    state_of,
)

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, set, deque)
_DEPTH = 10
"""The limit on levels of objects inside objects."""
_THINGS = 1000
"""The limit on objects, and on items of one container that are looked into."""
_COMPARED = 10_000
"""Longer containers are compared by length only."""
_KEPT = 2**16
"""Larger tensors are not copied: what a trace writes into them is refused, but not undone."""
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CODE = (*FUNCTIONS, types.BuiltinFunctionType)
_FOREIGN = {
    *("torch", "numpy", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("logging", "threading", "wholebatch", "builtins", "typing"),
}
_COMPILED = ("OptimizedModule", "RecursiveScriptModule", "TopLevelTracedModule")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Reach:
    """A snapshot of the state in sight of the code of `loss` and `model`.

    With `every`, that includes the modules themselves, and attributes of theirs that no code of
    their forward or of the loss names (the losses that a LightningModule collects at the end of a
    batch).
    """

    def __init__(self, model: nn.Module, loss: Any, *, every: bool = True) -> None:
        self._seen = {id(module) for module in model.modules()}
        self._things: list[_Thing] = []
        if every:
            look = functools.partial(_attributes, None)
            self._things = [_Thing(type(one).__name__, one, look) for one in model.modules()]
        kinds = dict.fromkeys(map(type, model.modules()))
        functions = _functions_named(
            [(loss, type(loss)), *((getattr(kind, "forward", None), kind) for kind in kinds)]
        )
        self._names = {name for one in functions for name in names_of(one.__code__)}
        self._visit(loss, "the loss function", 0)
        for prefix, module in model.named_modules():
            for name, value in vars(module).items():
                if not name.startswith("_") and (every or name in self._names):
                    self._visit(value, f"{prefix}.{name}".lstrip("."), 1)
        for function in functions:
            self._visit(function, function.__qualname__, _DEPTH - 2)

    def changed(self) -> str | None:
        """Return the name of the first value that has changed, or None."""
        return next((thing.name for thing in self._things if thing.differs()), None)

    def written(self) -> str | None:
        """Return the same right after a trace, which may also have written into tensors."""
        return next((t.changed_name() for t in self._things if t.is_written()), None)

    def accept_tensors(self) -> None:
        """Take the tensors' present versions as those of the snapshot."""
        for thing in self._things:
            thing.accept_tensor()

    def restore(self) -> None:
        """Restore the state of the snapshot."""
        for thing in self._things:
            thing.restore()

    def _visit(self, value: Any, name: str, depth: int) -> None:
        """Record this value and the values inside it."""
        if id(value) in self._seen or isinstance(value, PLAIN):
            return
        if depth > _DEPTH or len(self._things) >= _THINGS:
            return
        self._seen.add(id(value))
        look, inner = self._inside(value, name)
        if look is not None:
            self._things.append(_Thing(name, value, look))
        # Modules are nested deeply, and a partial is no level of its own.
        is_level = not isinstance(value, (nn.Module, functools.partial))
        for key, item in inner[:_THINGS]:
            self._visit(item, key, depth + is_level)

    def _inside(
        self, value: Any, name: str
    ) -> tuple[Callable[[Any], Any] | None, list[tuple[str, Any]]]:
        """Return how to look at this value (None: it is not compared), and the values inside it."""
        if isinstance(value, Tensor):
            return _tensor, []
        if isinstance(value, nn.Module):
            return _numbers, [(f"{name}.{key}", child) for key, child in value.named_children()]
        if isinstance(value, (*_CONTAINERS, tuple)):
            # A different tuple has a different identity.
            look = None if isinstance(value, tuple) else _items
            return look, [(f"{name}[{key!r}]", item) for key, item in _children(value)]
        if isinstance(value, FUNCTIONS):
            return (None if _is_foreign(_bare(value)) else _bindings), list(reached(value))
        if not _is_own_object(value):
            return None, []
        fields = fields_of(value)
        # The counters of a trainer do not matter if its method names other attributes, which may
        # still have the values of its class.
        shared = (vars(kind).items() for kind in type(value).__mro__)
        known = {
            *fields,
            *(key for pairs in shared for key, one in pairs if isinstance(one, PLAIN)),
        }
        wanted = self._names if self._names & known else None
        inner = [(f"{name}.{k}", v) for k, v in fields.items() if wanted is None or k in wanted]
        return functools.partial(_attributes, wanted), inner


def _functions_named(starts: Iterable[tuple[Any, type[Any]]]) -> list[types.FunctionType]:
    """Return the user's functions among these and those that they name, each once.

    A start is a function and the class in which its names are looked up.
    """
    found: dict[types.CodeType, types.FunctionType] = {}
    waiting = list(starts)
    while waiting and len(found) < _THINGS:
        function, kind = waiting.pop()
        if isinstance(function, types.MethodType):
            kind = type(function.__self__)
        waiting += [(one, kind) for _, one in _given(function) if isinstance(one, FUNCTIONS)]
        bare = _bare(function)
        if not isinstance(bare, types.FunctionType) or bare.__code__ in found or _is_foreign(bare):
            continue
        found[bare.__code__] = bare
        named = [value for _, _, value in _places_of(bare)]
        named += [
            _function_of(vars(base)[name])
            for base in kind.__mro__
            for name in names_of(bare.__code__)
            if name in vars(base)
        ]
        waiting += [(one, kind) for one in named if isinstance(one, FUNCTIONS)]
    return list(found.values())


class _Thing:
    """One object and its earlier state; `look` returns a comparable value for it."""

    def __init__(self, name: str, value: Any, look: Callable[[Any], Any]) -> None:
        self.name = name
        self._value = value
        self._look = look
        self._was = look(value)
        self._version = version_of(value) if isinstance(value, Tensor) else 0
        self._copy = _copied(value)
        # So that no other object gets the identity of one:
        self._held = list(_parts(value)) if isinstance(value, nn.Module) else []

    def differs(self) -> bool:
        return bool(self._look(self._value) != self._was)

    def changed_name(self) -> str:
        """Return its name, or that of its first attribute that has changed."""
        now = self._look(self._value)
        if not isinstance(now, dict):
            return self.name
        names = {key for key, _ in now.items() ^ self._was.items()}
        return f"{self.name}.{min(names)}"

    def accept_tensor(self) -> None:
        if isinstance(self._value, Tensor):
            self._was, self._version = self._look(self._value), version_of(self._value)

    def is_written(self) -> bool:
        """True if it differs, or is a tensor of any size that was written into."""
        if isinstance(self._value, Tensor) and version_of(self._value) != self._version:
            return True
        return self.differs()

    def restore(self) -> None:
        value, copy = self._value, self._copy
        if copy is None or not self.is_written():
            return
        if isinstance(value, Tensor):
            with torch.no_grad():
                value.copy_(copy)
            self.accept_tensor()
        elif isinstance(value, FUNCTIONS):
            for place, name, was in copy:
                if isinstance(place, types.CellType):
                    place.cell_contents = was
                else:
                    place[name] = was
        elif isinstance(value, _CONTAINERS):
            refill(value, copy)
        else:
            now = fields_of(value)
            for name in now.keys() - copy.keys():
                object.__delattr__(value, name)
            for name, was in copy.items():
                if now.get(name, copy) is not was:
                    object.__setattr__(value, name, was)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() > _KEPT or value.layout is not torch.strided:
            return None
        return value.detach().clone()
    if isinstance(value, _CONTAINERS):
        return copy_of(value)
    if isinstance(value, FUNCTIONS):
        return list(_places_of(value))
    return dict(fields_of(value))


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in `__slots__` too."""
    if hasattr(value, "__dict__"):
        return value.__dict__  # type: ignore[no-any-return]
    found = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [n for slots in found for n in ((slots,) if isinstance(slots, str) else slots)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


# ---------------------------------------------- how to look at a value: what is compared


def _items(value: Any) -> Any:
    if len(value) > _COMPARED:
        return len(value)
    if isinstance(value, set):
        return frozenset(_plain(item) for item in value)
    return [(key, _plain(item)) for key, item in _children(value)]


def _attributes(wanted: set[str] | None, value: Any) -> Any:
    fields = fields_of(value).items()
    return {key: _plain(item) for key, item in fields if wanted is None or key in wanted}


def _numbers(module: nn.Module) -> Any:
    """Return the plain attributes and the parts of a module that is not trained (a teacher)."""
    plain = [(name, value) for name, value in vars(module).items() if _is_plain(value)]
    return plain, list(map(id, _parts(module)))


def _bindings(function: Any) -> Any:
    own = vars(_bare(function)).items()
    return [(name, _plain(value)) for _, name, value in _places_of(function)], [
        (name, _plain(value)) for name, value in own
    ]


def _tensor(tensor: Tensor) -> int:
    return version_of(tensor) if tensor.numel() <= SMALL else 0


def version_of(tensor: Tensor) -> int:
    """Return the number of writes into a tensor; those of inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _plain(value: Any) -> Any:
    return value if isinstance(value, PLAIN) else id(value)


def _parts(module: nn.Module) -> Iterator[Any]:
    for part in (module._parameters, module._buffers, module._modules):
        yield from part.values()


# ----------------------------------------------------------- what is inside a value


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from ((k if isinstance(k, PLAIN) else id(k), item) for k, item in value.items())
    elif isinstance(value, set):
        yield from ((None, item) for item in value)
    else:
        yield from enumerate(value)


def _bare(function: Any) -> Any:
    """Return the function behind a partial, a method or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        return function.__func__
    if isinstance(function, types.FunctionType):
        return function
    return getattr(type(function), "__call__", function)  # noqa: B004  (the function is wanted)


def _function_of(found: Any) -> Any:
    """Return the function of a property, or of a static or class method."""
    for name in ("fget", "func", "__func__"):
        found = getattr(found, name, found)
    return found


def _places_of(function: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield where a function's free names live: (cell or dictionary, name, value)."""
    bare = _bare(function)
    code = getattr(bare, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, bare.__closure__ or (), strict=False):
        try:
            yield cell, name, cell.cell_contents
        except ValueError:  # The cell is still empty.
            continue
    space = bare.__globals__
    yield from ((space, name, space[name]) for name in names_of(code) if name in space)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names and texts in this code, with those of the functions that are made in it.

    By a text code may read an attribute (`getattr`) or a global.
    """
    texts = (text for text in code.co_consts if isinstance(text, str))
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *texts, *(n for c in inner for n in names_of(c))]))


def _given(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arguments that a partial holds, by name."""
    while isinstance(function, functools.partial):
        yield from ((f"argument {n}", value) for n, value in enumerate(function.args))
        yield from function.keywords.items()
        function = function.func


def reached(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function can reach besides its arguments, by name."""
    yield from _given(function)
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield type(owner).__name__, owner
    bare = _bare(function)
    if _is_foreign(bare):
        return
    yield from ((name, value) for _, name, value in _places_of(bare))
    yield from (getattr(bare, "__kwdefaults__", None) or {}).items()
    yield from (
        (f"default {n}", v) for n, v in enumerate(getattr(bare, "__defaults__", None) or ())
    )


def _is_own_object(value: Any) -> bool:
    """True if it is an object of the user's, with attributes."""
    if isinstance(value, (type, types.ModuleType)):
        return False
    has_attributes = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    return has_attributes and not _is_foreign(type(value))


def _is_foreign(thing: Any) -> bool:
    """True if it belongs to a library, whose state is not the user's."""
    module = getattr(thing, "__module__", None) or "builtins"
    return module.partition(".")[0] in _FOREIGN


class Fingerprint:
    """All plain values that the forward of a model under a loss function may read.

    `changed()` runs at every window while the device waits, so it must be cheap. Plain values are
    compared by name, and a module that gained or lost attributes counts as changed.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self._model = _Attributes("", list(model.modules()))
        self._modules = [_Attributes(name, [module]) for name, module in model.named_modules()]
        self._reach = Reach(model, loss, every=False)
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._watched: list[tuple[Tensor, int]] = []

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count a write into one of these tensors as a change from now on."""
        self._watched += [(tensor, version_of(tensor)) for tensor in tensors]

    def accept_tensors(self) -> None:
        """Take tensors as unchanged: all were put back, which counts as a write into each."""
        for part in (self._model, *self._modules):
            part.accept_tensors()
        self._reach.accept_tensors()
        self._watched = [(tensor, version_of(tensor)) for tensor, _ in self._watched]

    def changed(self) -> str | None:
        """Return the name of the first thing that has changed, or None."""
        if self._deterministic != torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms"
        # All modules at once first: one by one takes much longer.
        for module in () if self._model.hold() else self._modules:
            if not module.hold():
                return module.name
        if any(version_of(tensor) != version for tensor, version in self._watched):
            return "a tensor on the host"
        return self._reach.changed()

    def holds(self) -> bool:
        """True if nothing has changed."""
        return self.changed() is None


class _Attributes:
    """The plain attributes of modules, and the identities of their tensors and submodules."""

    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        self.name = f"an attribute of {name or 'the model'}"
        self._all = [vars(module) for module in modules]
        self._readers = [_reader_of(attributes) for attributes in self._all]
        self._parts = [
            part for one in modules for part in (one._parameters, one._buffers, one._modules)
        ]
        # Held, so that no other object gets the identity of one.
        self._held = [value for part in self._parts for value in part.values()]
        kinds = (Tensor, nn.Parameter)
        self._dense: list[Any] = [one for one in self._held if type(one) in kinds]
        self._tensors = [
            (one, name) for one in self._all for name, v in one.items() if isinstance(v, Tensor)
        ]
        self._hooks = [one.get(kind, ()) for one in self._all for kind in _HOOKS]
        self._as_found = self._state()
        self.accept_tensors()

    def accept_tensors(self) -> None:
        """Compare tensor attributes with what they are now from here on."""
        self._states = self._tensor_states()

    def _tensor_states(self) -> list[tuple[int, int]]:
        held = (attributes.get(name) for attributes, name in self._tensors)
        return [(id(one), _tensor(one) if isinstance(one, Tensor) else 0) for one in held]

    def _state(self) -> tuple[list[Any], ...]:
        return (
            list(map(len, self._all)),
            list(map(id, chain.from_iterable(part.values() for part in self._parts))),
            # `parameter.data = ...` keeps the object, not its strides and dtype.
            list(map(Tensor.stride, self._dense)),
            list(map(operator.attrgetter("dtype"), self._dense)),
            list(map(len, self._hooks)),
            [read(attributes) for read, attributes in zip(self._readers, self._all, strict=True)],
        )

    def hold(self) -> bool:
        try:
            same = self._state() == self._as_found
        except KeyError:  # an attribute is gone
            return False
        return same and self._tensor_states() == self._states


def _reader_of(attributes: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the function that reads the plain attributes out of this dictionary."""
    names = tuple(name for name, value in attributes.items() if _is_plain(value))
    return operator.itemgetter(*names) if names else lambda _: None


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, PLAIN) for item in value)
    return isinstance(value, (*PLAIN, *_CODE))


def _is_traceable_hook(hook: Any) -> bool:
    """True for hooks that leave nothing behind in Python.

    They are `output.requires_grad_(True)`, which PEFT and transformers register on embeddings, and
    the hooks by which transformers hands the outputs of inner layers to its caller.
    """
    code = getattr(hook, "__code__", None)
    if code is None:
        return False
    model = _require_grad.__code__
    if (code.co_code, code.co_names, code.co_consts[-1:]) == (
        model.co_code,
        model.co_names,
        model.co_consts[-1:],
    ):
        return True
    return str(hook.__module__) == "transformers.utils.output_capturing"


def _require_grad(module: Any, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def refuse_hooks(model: nn.Module) -> None:
    """Raise CannotTrace for a model with hooks: a graph would run their Python only once.

    Modules made by torch.compile or torch.jit are refused too: their forward is no longer Python.
    """
    for name, module in model.named_modules():
        if type(module).__name__ in _COMPILED:
            raise CannotTrace(f"{name or 'the model'} is an {type(module).__name__}")
        for kind in _HOOKS:
            hooks = getattr(module, kind, None) or {}
            if not all(map(_is_traceable_hook, hooks.values())):
                raise CannotTrace(
                    f"{name or 'the model'} has {kind.strip('_').replace('_', ' ')}, which a graph "
                    "would run only once"
                )


@contextmanager
def only_our_draws(model: nn.Module, loss: Callable[..., Any]) -> Iterator[None]:
    """Refuse code that draws from a generator that a graph does not know; put them all back."""
    random = capture_python_random()
    own = [(one, state_of(one)) for one in own_generators(model, loss)]
    try:
        yield
    finally:
        now = capture_python_random()
        restore_random(random)
        drawn = [one for one, state in own if not same_random(state, state_of(one))]
        for one, state in own:
            set_state_of(one, state)
    for name, library in (("python", "Python"), ("numpy", "numpy")):
        if name in random and not same_random(random[name], now[name]):
            raise CannotTrace(f"its forward draws from {library}'s random module")
    if drawn:
        raise CannotTrace(f"it draws from a {type(drawn[0]).__name__} of its own")
