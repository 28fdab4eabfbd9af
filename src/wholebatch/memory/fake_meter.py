"""A cache of the results of operations on fake tensors.

A fake tensor has no data, so the shapes, strides, dtypes and aliases of an operation's results
follow from those of its inputs and from its other arguments. Asking torch takes 0.1 ms or more, and
a transformer of 16 equal layers asks the same question 16 times, for every micro-batch and way of
running. A result is reused only if nothing else can matter. Tensors with a constant value, unusual
layouts and operations that return numbers go to torch every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from wholebatch.memory.fake_tensors import asked_of
from wholebatch.memory.meter import MemoryMeter

__all__ = ["FakeMeter"]

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


class FakeMeter(MemoryMeter):
    """The meter over fake tensors, with what they lack to run a whole step."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        granule: int,
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, device=device, granule=granule)
        self._answers = False
        self._shapes: Shapes | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled on fake tensors, and asking costs more than the answer

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE_OF:  # asked of fake tensors at every turn; makes nothing
            of = args[0]
            return of.fake_device if isinstance(of, FakeTensor) else func(*args)
        return self._counted(func, args, kwargs or {})

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As the meter's own, quicker for what is remembered: nearly everything is."""
        in_backward = torch._C._current_graph_task_id() != -1
        self._follow(in_backward=in_backward, recomputing=in_backward and torch.is_grad_enabled())
        if self._shapes is None or func.__name__.startswith(_CHANGE_LISTS):
            return super()._counted(func, args, kwargs)
        result = self._shapes.call(func, args, kwargs, self._asked, self._see_given)
        if result is NOT_LOOKED_AT:
            return super()._counted(func, args, kwargs)
        self._see((result,), "temporaries")
        return result

    def _see_given(self, tensors: Sequence[FakeTensor]) -> None:
        live, kind = self._ledger.live, self._device_type
        for tensor in tensors:  # all of them strided
            if tensor.fake_device.type == kind:
                storage = tensor.untyped_storage()
                # The size of one that is known changes where it is told (`resize_`) or returned.
                if storage._cdata not in live:
                    self._ledger.see(storage, "inputs")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer 1 where a number is read out of a tensor, as optimizers do with their steps.

        The memory of an update does not depend on it. That of a loss might, so there the error of
        the fake tensor stands.
        """
        self._answers = True
        try:
            yield
        finally:
            self._answers = False

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What is not remembered."""
        if self._shapes is None:
            mode = next((one.fake_mode for one in args if isinstance(one, FakeTensor)), None)
            if mode is not None:
                self._shapes = Shapes(mode)
            return self._asked(func, args, kwargs)
        changes = func.__name__.startswith(_CHANGE_LISTS) and not func._schema.returns
        if changes and all(_is_unknown(one) for one in args):
            return None  # nothing is made, and nothing that was known is forgotten
        if func is _NUMBER_OF and isinstance(args[0], FakeTensor):
            known = args[0].constant
            if known is not None:
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
                    return known.item()
            if self._answers:
                return 1
        return self._asked(func, args, kwargs)

    def _asked(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return asked_of(func, args, kwargs)
        except DataDependentOutputException:
            if not self._answers:
                raise
            return 1


def _is_unknown(value: Any) -> bool:
    """Whether there are no numbers known of tensors, which a change would make wrong."""
    if isinstance(value, list | tuple):
        return all(_is_unknown(one) for one in value)
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)  # of a sharded one
        return type(local) is FakeTensor and local.constant is None
    return True


_CHANGE_LISTS = ("_foreach_", "_fused_")
_DEVICE_OF = torch.ops.prim.device.default
_NUMBER_OF = torch.ops.aten._local_scalar_dense.default
