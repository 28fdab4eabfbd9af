"""A digest of a model and a loss function: their code, and every value that this code may read.

Two processes in which it is equal run the same Python on the same values, so that a graph that was
made in one is right in the other. The digest covers the functions that run, as they are now (a
patched one is another), closures, defaults, the globals and attributes that the code names,
configurations, the kind of every tensor, and the source files of all modules that these come from
or import. `Unknown` is raised for what cannot be compared between processes.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import hashlib
import os
import re
import sys
import time
import types
import typing
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.compile.captured_state import (
    FUNCTIONS,
    PLAIN,
    code_of,
    fields_of,
    names_of,
    places_of,
)
from wholebatch.compile.value_reads import SMALL

_MOST = 100_000
"""The most objects that are looked at."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
_BYTES = 2**20
"""The largest array of NumPy that is read."""
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "triton", "wholebatch"}
"""Modules whose code is given by their versions."""
_BY_VALUE = (enum.Enum, re.Pattern, range, slice, Path, typing.TypeVar, torch.Size, torch.finfo)
_BY_NAME = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_WITHOUT_VALUE = ("logging", "threading", "_thread", "weakref", "torch._dynamo")
"""Modules whose objects hold nothing that a forward computes with."""


class Unknown(Exception):
    """The code may read something that cannot be compared between processes."""


class CodeDigest:
    """The digest of all values that are added."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # so that no other object gets the identity of one
        self._spaces: dict[int, tuple[Any, set[str]]] = {}
        """Classes and objects, and the names that were read of them: those that the code names."""
        self._names = {"forward", "__call__", "__getattr__", "__getitem__"}
        self._modules: set[str] = set()
        self._inputs: set[int] = set()  # Tensors of modules: a graph reads their present values.

    def add(self, value: Any, name: str) -> None:
        """Add a value and everything in it; `name` is how a message calls it."""
        write, kind = self._parts.append, type(value)
        if isinstance(value, PLAIN):
            write((kind.__name__, value))
            return
        if isinstance(value, _CONTAINERS) and not value:
            write(kind.__name__)
            return
        if id(value) in self._seen:
            write(self._seen[id(value)])
            return
        if len(self._seen) >= _MOST:
            raise Unknown("its code reaches too many objects")
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        write((kind.__module__, kind.__qualname__))
        if isinstance(value, Tensor):
            write((value.shape, value.stride(), value.dtype, value.device, value.requires_grad))
            if value.numel() <= SMALL and id(value) not in self._inputs:
                write(value.tolist())
        elif isinstance(value, nn.Module):
            self._inputs.update(map(id, (*value._parameters.values(), *value._buffers.values())))
            self._class(kind)
            self._fields(vars(value).items(), name)
        elif isinstance(value, Mapping):
            self._fields(value.items(), name)
        elif isinstance(value, (list, tuple, deque)):
            write(len(value))
            for item in value:
                self.add(item, name)
        elif isinstance(value, (set, frozenset)):
            write(sorted(map(repr, value)))
        elif isinstance(value, FUNCTIONS):
            self._function(value, name)
        elif isinstance(value, type):
            write((value.__module__, value.__qualname__))
            self._class(value)
        elif isinstance(value, types.ModuleType):
            write(value.__name__)
            self._modules.add(value.__name__)
        elif isinstance(value, _BY_VALUE) or kind.__module__ == "typing":
            write(repr(value))
        elif isinstance(value, _BY_NAME):
            write(str(getattr(value, "__qualname__", value)))
        elif isinstance(value, contextvars.ContextVar):
            self.add(value.get(None), name)
        elif isinstance(value, (property, staticmethod, classmethod)):
            self.add(code_of(value), name)
        elif hasattr(value, "tobytes") and getattr(value, "nbytes", _BYTES + 1) <= _BYTES:
            write(
                (str(getattr(value, "dtype", kind)), getattr(value, "shape", ()), value.tobytes())
            )
        elif kind is object or kind.__module__.startswith(_WITHOUT_VALUE):
            pass
        elif hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
            self._class(kind)
            fields = fields_of(value)
            private = {key for key in fields if key.startswith("_")}
            self._spaces[id(value)] = value, fields.keys() - private
            self._fields(((key, fields[key]) for key in fields if key not in private), name)
        else:
            raise Unknown(f"{name} is a {kind.__module__}.{kind.__qualname__}")

    def _fields(self, fields: Iterable[tuple[Any, Any]], name: str) -> None:
        for key, item in fields:
            if isinstance(item, PLAIN) and isinstance(key, str):
                self._parts.append((key, type(item).__name__, item))
            elif not (isinstance(item, _CONTAINERS) and not item):  # Most are hooks.
                self.add(key, name)
                self.add(item, f"{name}.{key}")

    def _function(self, function: Any, name: str) -> None:
        if isinstance(function, functools.partial):
            self.add([function.func, function.args, function.keywords], name)
            return
        if isinstance(function, types.MethodType):
            self.add([function.__func__, function.__self__], name)
            return
        self._parts.append((function.__module__, function.__qualname__))
        if _is_library(function.__module__):
            for _, key, item in places_of(function, outside=False):
                self.add(item, f"{name} ({key})")
            return
        self._modules.add(function.__module__)
        self._parts += _instructions(function.__code__)
        self._names.update(names_of(function.__code__))
        own = {k: v for k, v in vars(function).items() if not k.startswith("_torchdynamo")}
        self.add([function.__defaults__, function.__kwdefaults__, own], name)
        for _, key, item in places_of(function):
            self._parts.append(key)
            if type(item) is dict and all(isinstance(one, str) for one in item):
                item = dict(sorted(item.items()))  # Its order may be that of a set.
            self.add(item, f"{key} in {function.__qualname__}")

    def _class(self, kind: type[Any]) -> None:
        for one in kind.__mro__:
            if id(one) not in self._spaces and not _is_library(one.__module__):
                self._spaces[id(one)] = one, set()
                self._parts.append((one.__module__, one.__qualname__))
                self._modules.add(one.__module__)

    def hexdigest(self) -> str:
        """Return the digest, with the methods and the source files of all that was added."""
        while self._add_what_is_named():
            pass
        for name in sorted(_imported(self._modules)):
            self._parts.append((name, _file_of(sys.modules[name])))
        return hashlib.sha256("\n".join(map(repr, self._parts)).encode()).hexdigest()

    def _add_what_is_named(self) -> bool:
        """Add what classes and objects hold under names that the code reads, if there is more."""
        found = False
        for space, done in list(self._spaces.values()):
            fields = fields_of(space)
            for key in sorted((self._names & fields.keys()) - done):
                found = True
                done.add(key)
                self._parts.append(key)
                self.add(fields[key], f"{getattr(space, '__qualname__', '')}.{key}")
        return found


def _is_library(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in _LIBRARIES


def _instructions(code: types.CodeType) -> Iterator[Any]:
    """Yield what this code does; where it stands in its file does not matter."""
    yield code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)
        else:
            is_set = isinstance(constant, frozenset)
            yield sorted(map(repr, constant)) if is_set else constant


def _imported(modules: set[str]) -> set[str]:
    """Return these modules, and those that their globals come from."""
    found: set[str] = set()
    open_ = [name for name in modules if name in sys.modules]
    while open_:
        name = open_.pop()
        if name in found or _is_library(name):
            continue
        found.add(name)
        for item in list(vars(sys.modules[name]).values()):
            if isinstance(item, types.ModuleType):  # Ask it for nothing else: it may be lazy.
                other = vars(item).get("__name__")
            else:
                other = getattr(item, "__module__", None)
            if isinstance(other, str) and other not in found and other in sys.modules:
                open_.append(other)
    return found


def _file_of(module: types.ModuleType) -> tuple[str, int, int] | None:
    """Return path, size and time of the file that a module was loaded from."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    try:
        found = os.stat(file)
    except OSError:
        raise Unknown(f"{file} is gone") from None
    if found.st_mtime >= _STARTED:
        raise Unknown(f"{file} has changed since this process began")
    return file, found.st_size, found.st_mtime_ns


def _start_of_process() -> float:
    """Return when this process began, or at the latest when this module was imported."""
    with suppress(OSError, ValueError, AttributeError):  # Not Linux.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    return time.time()


_STARTED = _start_of_process()
