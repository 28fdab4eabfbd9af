"""A cache of the results of operations on fake tensors.

A fake tensor has no data, so the shapes, strides, dtypes and aliases of an operation's results
follow from those of its inputs and from its other arguments. Asking torch takes 0.1 ms or more, and
a transformer of 16 equal layers asks the same question 16 times, for every micro-batch and way of
running. A result is reused only if nothing else can matter. Tensors with a constant value, unusual
layouts and operations that return numbers go to torch every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["NOT_LOOKED_AT", "Shapes"]

_MOST = 1 << 14
"""The number of cached answers; a model asks some hundred different questions for each size."""


@dataclass(frozen=True)
class _Made:
    """A new tensor with its own storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _View:
    """A tensor on the storage of an argument."""

    of: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Same:
    """An argument itself."""

    argument: int


_Part: TypeAlias = _Made | _View | _Same | None


@dataclass(frozen=True)
class _Answer:
    """The result of an operation: one tensor, or a sequence of this type."""

    parts: tuple[_Part, ...]
    sequence: type | None


_ANSWERS: dict[Any, _Answer | None] = {}
"""The cached answers; None marks a question whose answer must not be reused."""


class Shapes:
    """Cached results for the tensors of one fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def call(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        ask: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any],
        see: Callable[[Sequence[FakeTensor]], None],
    ) -> Any:
        """Return the result of `func`, cached or from `ask`, or NOT_LOOKED_AT if it has no key.

        `see` is called first, with the tensors among the arguments.
        """
        given: list[FakeTensor] = []
        try:
            key = _question(func, args, kwargs, given)
            answer = _ANSWERS.get(key, _UNKNOWN)
        except TypeError:  # An argument is not hashable, or its value may matter.
            return NOT_LOOKED_AT
        if not given:
            return NOT_LOOKED_AT
        see(given)
        if answer is None:
            return ask(func, args, kwargs)
        if answer is not _UNKNOWN:
            assert isinstance(answer, _Answer)
            with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
                made = [self._build(part, given) for part in answer.parts]
            return made[0] if answer.sequence is None else answer.sequence(made)
        storages = [tensor.untyped_storage()._cdata for tensor in given]
        result = ask(func, args, kwargs)
        if len(_ANSWERS) >= _MOST:
            _ANSWERS.clear()
        unchanged = _question(func, args, kwargs, []) == key  # False for `resize_`, `out=`, …
        _ANSWERS[key] = _answer(result, given, storages) if unchanged else None
        return result

    def _build(self, part: _Part, given: list[FakeTensor]) -> torch.Tensor | None:
        if part is None:
            return None
        if isinstance(part, _Same):
            return given[part.argument]
        if isinstance(part, _Made):
            plain = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device=_META)
        else:
            plain = torch.empty(0, dtype=part.dtype, device=_META)
            storage = given[part.of].untyped_storage()
            plain.set_(storage, part.offset, part.shape, part.stride)
        # Do as FakeTensor's constructor does, and copy the attributes of a tensor it has made.
        made = torch.Tensor._make_subclass(  # type: ignore[attr-defined, unused-ignore]
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=part.device
        )
        attributes = self._attributes.get(part.device)
        if attributes is None:
            attributes = self._attributes[part.device] = dict(
                vars(FakeTensor(self._mode, torch.empty(0, device="meta"), part.device))
            )
        vars(made).update(attributes)
        return made  # type: ignore[no-any-return, unused-ignore]


NOT_LOOKED_AT: Any = object()
"""The marker for a call that is not cached, because more than shapes may matter."""
_UNKNOWN: Any = object()
_META = torch.device("meta")


def _question(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[FakeTensor]
) -> tuple[Any, ...]:
    key = (func, *[_key(value, given) for value in args])
    if kwargs:
        key = (*key, *[(name, _key(value, given)) for name, value in kwargs.items()])
    return key


def _key(value: Any, given: list[FakeTensor]) -> Any:
    """Return the part of an argument that matters; append tensors to `given`."""
    if isinstance(value, FakeTensor):
        dtype = value.dtype
        if (
            value.constant is not None
            or value.layout is not torch.strided
            or dtype.is_complex
            or value.is_neg()
        ):
            raise TypeError
        given.append(value)
        offset = value.storage_offset()
        return value.shape, value.stride(), dtype, value.fake_device, offset
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return kind, value  # 1, 1.0 and True are equal, but give different dtypes.
    if kind is list or kind is tuple:
        return tuple([_key(one, given) for one in value])
    if isinstance(value, torch.Tensor):
        raise TypeError
    return value


def _answer(result: Any, given: list[FakeTensor], storages: list[int]) -> _Answer | None:
    """Return a description from which to rebuild this result, or None if there is none."""
    is_one = isinstance(result, torch.Tensor)
    if not is_one and type(result) not in (tuple, list):
        return None
    parts: list[_Part] = []
    new: set[int] = set()
    for one in [result] if is_one else result:
        if one is None:
            parts.append(None)
            continue
        if not isinstance(one, FakeTensor):
            return None
        same = next((place for place, tensor in enumerate(given) if tensor is one), None)
        if same is not None:
            parts.append(_Same(same))
            continue
        unusual = one.layout is not torch.strided or one.is_neg() or one.dtype.is_complex
        if one.constant is not None or unusual:
            return None
        storage = one.untyped_storage()
        shape, stride = tuple(one.shape), one.stride()
        if storage._cdata in storages:
            of = storages.index(storage._cdata)
            offset = int(one.storage_offset())
            parts.append(_View(of, shape, stride, offset, one.dtype, one.fake_device))
            continue
        if storage._cdata in new or storage.nbytes() != _extent(shape, stride, one.element_size()):
            return None
        new.add(storage._cdata)
        parts.append(_Made(shape, stride, one.dtype, one.fake_device))
    return _Answer(tuple(parts), None if is_one else type(result))


def _extent(shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> int:
    """Return the bytes of a tensor that starts at its storage and fills it."""
    if 0 in shape:
        return 0
    return size * (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)))
