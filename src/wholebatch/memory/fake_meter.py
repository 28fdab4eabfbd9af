"""The memory meter over fake tensors, and its cache of the results of operations on them.

A fake tensor has no data, so the shapes, strides, dtypes and aliases of an operation's results
follow from those of its inputs and from its other arguments. Asking torch takes 0.1 ms or more, and
a transformer of 16 equal layers asks the same question 16 times, for every micro-batch and way of
running. A result is reused only if nothing else can matter. Tensors with a constant value, unusual
layouts and operations that return numbers go to torch every time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from wholebatch.memory.fake_tensors import run_fake
from wholebatch.memory.meter import MemoryMeter, Record, StorageLedger, by_category, storage_id
from wholebatch.window.forward_state import replaced_attributes

_MOST = 1 << 14
"""The number of cached results; a model asks for some hundred different ones at each size."""


class _Made(NamedTuple):
    """A tensor on a new storage, or on that of argument number `of`."""

    of: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


_Part: TypeAlias = _Made | int | None
"""A tensor of a result; a number is the argument itself."""


@dataclass(frozen=True)
class _CachedResult:
    """The result of an operation: one tensor, or a sequence of this type."""

    parts: tuple[_Part, ...]
    sequence: type | None


_RESULTS: dict[Any, _CachedResult | None] = {}
"""The cached results; None marks a question whose result must not be reused."""

_UNKNOWN: Any = object()
_META = torch.device("meta")
_CHANGE_LISTS = ("_foreach_", "_fused_")
_DEVICE_OF = torch.ops.prim.device.default
_NUMBER_OF = torch.ops.aten._local_scalar_dense.default


class FakeMeter(MemoryMeter):
    """The meter over fake tensors, which can also run an optimizer's step on them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._answers = False
        self._mode: FakeTensorMode | None = None  # of the first fake tensor that is seen
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of fake tensors on a device

        self._place = "0 start"
        self._at_peaks: dict[str, list[Record]] = {}  # of the parts before this one

    def reach(self, place: str) -> None:
        """End a part of a window, whose peak is kept, and begin the one at `place`."""
        self._at_peaks[self._place] = self.at_peak()
        count = sum(known.endswith(place) for known in self._at_peaks)
        self._place = f"{count} {place}"  # Several micro-batches come by.
        largest = self.largest
        StorageLedger.reset_peak(self)
        self.largest = largest

    def peaks_by_part(self) -> dict[str, dict[str, int]]:
        """Return the bytes by category at the peak of each part since the last reset."""
        self._mark_known()
        self._at_peaks[self._place] = self.at_peak()
        return {place: by_category(records) for place, records in self._at_peaks.items()}

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are alive now, and forget the parts before."""
        super().reset_peak()
        self._at_peaks.clear()
        self._place = "0 start"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled on fake tensors, and asking torch takes longer

    def answering(self) -> AbstractContextManager[None]:
        """Answer 1 if a number is read out of a tensor, as optimizers do with their steps.

        The memory of an update does not depend on it. That of a loss might, so a loss gets the
        fake tensor's error.
        """
        return replaced_attributes(self, _answers=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:  # asked very often, and makes nothing
            of = args[0]
            return of.fake_device if isinstance(of, FakeTensor) else func(*args)
        return self._counted(func, args, kwargs or {})

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Count an operation; nearly every result comes from the cache."""
        in_backward = torch._C._current_graph_task_id() != -1
        self._follow(in_backward=in_backward, recomputing=in_backward and torch.is_grad_enabled())
        if self._mode is None or func.__name__.startswith(_CHANGE_LISTS):
            return super()._counted(func, args, kwargs)
        given: list[FakeTensor] = []
        try:
            key = _question(func, args, kwargs, given)
            cached = _RESULTS.get(key, _UNKNOWN)
        except TypeError:  # An argument is not hashable, or its value may matter.
            return super()._counted(func, args, kwargs)
        if not given:
            return super()._counted(func, args, kwargs)
        self._see_given(given)
        if cached is _UNKNOWN:
            storages = [storage_id(tensor.untyped_storage()) for tensor in given]
            result = self._asked(func, args, kwargs)
            if len(_RESULTS) >= _MOST:
                _RESULTS.clear()
            unchanged = _question(func, args, kwargs, []) == key  # False for `resize_`, `out=`, …
            _RESULTS[key] = _described(result, given, storages) if unchanged else None
        elif cached is None:
            result = self._asked(func, args, kwargs)
        else:
            with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
                made = [self._rebuilt(part, given) for part in cached.parts]
            result = made[0] if cached.sequence is None else cached.sequence(made)
        self._see((result,), "temporaries")
        return result

    def _rebuilt(self, part: _Part, given: list[FakeTensor]) -> torch.Tensor | None:
        """Make a fake tensor as torch would."""
        if part is None:
            return None
        if isinstance(part, int):
            return given[part]
        if part.of is None:
            plain = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device=_META)
        else:
            plain = torch.empty(0, dtype=part.dtype, device=_META)
            storage = given[part.of].untyped_storage()
            plain.set_(storage, part.offset, part.shape, part.stride)
        # Do as FakeTensor's constructor does, and copy the attributes of a tensor it has made.
        made = torch.Tensor._make_subclass(  # type: ignore[attr-defined, unused-ignore]
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=part.device
        )
        if part.device not in self._attributes:
            assert self._mode is not None
            like = FakeTensor(self._mode, torch.empty(0, device="meta"), part.device)
            self._attributes[part.device] = dict(vars(like))
        vars(made).update(self._attributes[part.device])
        return made  # type: ignore[no-any-return, unused-ignore]

    def _see_given(self, tensors: Sequence[FakeTensor]) -> None:
        live, kind = self.live, self._device_type
        for tensor in tensors:  # all of them strided
            if tensor.fake_device.type == kind:
                storage = tensor.untyped_storage()
                # The ledger learns of a new size from `resize_`, or from a result.
                if storage_id(storage) not in live:
                    self.see(storage, "inputs")

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation that is not cached."""
        if self._mode is None:
            self._mode = next((one.fake_mode for one in args if isinstance(one, FakeTensor)), None)
            return self._asked(func, args, kwargs)
        changes = func.__name__.startswith(_CHANGE_LISTS) and not func._schema.returns
        if changes and all(_is_unknown(one) for one in args):
            return None  # It makes nothing, and changes no known number.
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
            return run_fake(func, args, kwargs)
        except DataDependentOutputException:
            if not self._answers:
                raise
            return 1


def _is_unknown(value: Any) -> bool:
    """True if no number of these tensors is known, which a change would make wrong."""
    if isinstance(value, list | tuple):
        return all(_is_unknown(one) for one in value)
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)  # a sharded tensor has one
        return type(local) is FakeTensor and local.constant is None
    return True


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
        _check_usual(value)
        given.append(value)
        offset = value.storage_offset()
        return value.shape, value.stride(), value.dtype, value.fake_device, offset
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return kind, value  # 1, 1.0 and True are equal, but give different dtypes.
    if kind is list or kind is tuple:
        return tuple([_key(one, given) for one in value])
    if isinstance(value, torch.Tensor):
        raise TypeError
    return value


def _described(result: Any, given: list[FakeTensor], storages: list[int]) -> _CachedResult | None:
    """Return a description from which to rebuild this result, or None if there is none."""
    is_one = isinstance(result, torch.Tensor)
    if not is_one and type(result) not in (tuple, list):
        return None
    new: set[int] = set()
    try:
        parts = [_part(one, given, storages, new) for one in ([result] if is_one else result)]
    except TypeError:
        return None
    return _CachedResult(tuple(parts), None if is_one else type(result))


def _part(one: Any, given: list[FakeTensor], storages: list[int], new: set[int]) -> _Part:
    """Describe one tensor of a result; raise TypeError if it cannot be rebuilt."""
    if one is None:
        return None
    if not isinstance(one, FakeTensor):
        raise TypeError
    same = next((place for place, tensor in enumerate(given) if tensor is one), None)
    if same is not None:
        return same
    _check_usual(one)
    storage = one.untyped_storage()
    shape, stride = tuple(one.shape), one.stride()
    key = storage_id(storage)
    if key in storages:
        offset = int(one.storage_offset())
        return _Made(storages.index(key), shape, stride, offset, one.dtype, one.fake_device)
    if key in new or storage.nbytes() != _extent(shape, stride, one.element_size()):
        raise TypeError
    new.add(key)
    return _Made(None, shape, stride, 0, one.dtype, one.fake_device)


def _check_usual(tensor: FakeTensor) -> None:
    """Raise TypeError for a tensor of which more than shape, strides and dtype matter."""
    if (
        tensor.constant is not None
        or tensor.layout is not torch.strided
        or tensor.dtype.is_complex
        or tensor.is_neg()
    ):
        raise TypeError


def _extent(shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> int:
    """Return the bytes of a tensor that starts at its storage and fills it."""
    if 0 in shape:
        return 0
    return size * (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)))
