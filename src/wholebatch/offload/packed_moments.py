"""Adam's two old moments in the memory of the second one, while a window is open.

16 bits are enough for each (docs/gradients.md says why), and they share the 32 of `exp_avg_sq`:

    m    as float16, relative to the largest of its tensor
    v    the bits of its float32, which are a logarithm in steps: 64 powers of two below the
         largest, 1024 steps in each; a dither keeps the rounding of many updates unbiased

In float64 there are 64 bits, and both are kept as float32, without scale and dither.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK = 2**22
"""Elements that are processed together: temporaries are a few of this size."""
_DROPPED = 13
"""The low bits of a float32 that v drops: 10 of its 23 are left."""
_STEP = 2**_DROPPED
_OCTAVES = 2**29
"""64 powers of two, in the bits of a float32."""
_GOLDEN = 0.6180339887498949
_HALF_MOST = 2.0**15
"""The largest m in float16, whose range ends at 65504."""
_LOWER = 0 if sys.byteorder == "little" else 1
_SMALLEST = 2.0**-100
"""The smallest scale of m: its inverse is still a float32."""


class Key(NamedTuple):
    """The numbers that two moments are packed with."""

    row: Tensor
    """The numbers that `unpack` needs: the scale of m, the lowest bits of v, and the dither."""
    shift: Tensor
    factor: Tensor


def keys_of(
    firsts: Sequence[Tensor], seconds: Sequence[Tensor], counts: Sequence[Tensor | float]
) -> list[Key]:
    """Return the keys of many moments of one dtype and device, by as many kernels as for one.

    `counts` are the numbers of updates so far. Nothing is changed or read from the device.
    """
    nothing = torch.zeros(3, dtype=torch.float64)
    keys = [Key(nothing, nothing[0], nothing[0])] * len(firsts)
    some = [index for index, first in enumerate(firsts) if first.numel()]
    if not some or firsts[0].dtype is torch.float64:
        return keys
    rows = _rows([firsts[i] for i in some], [seconds[i] for i in some], [counts[i] for i in some])
    scale, base, dither = rows.unbind(-1)
    shifts, factors = (dither - base).int(), (_HALF_MOST / scale).float()
    for index, *key in zip(some, rows.unbind(), shifts.unbind(), factors.unbind(), strict=True):
        keys[index] = Key(*key)
    return keys


def pack(firsts: Sequence[Tensor], seconds: Sequence[Tensor], keys: Sequence[Key]) -> None:
    """Put both moments of each parameter into the memory of the second; dtype and device are one.

    All memory is allocated before the first change, so that a failure leaves both moments intact.
    """
    shift, factor = (torch.stack(some) for some in zip(*(key[1:] for key in keys), strict=True))
    for m, v, scratch, *numbers in _pieces(firsts, seconds, (shift, factor), unpacks=False):
        if v.dtype is torch.float64:
            _put_in_full(m, v, scratch)
        else:
            _put(m, v, scratch, *numbers)


def unpack(
    firsts: Sequence[Tensor], seconds: Sequence[Tensor], rows: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield pieces of the moments: the first as it is now, the old first, and the old second.

    The old first is valid until the next piece, and may be written to.
    """
    scale, base, dither = torch.stack(list(rows)).unbind(-1)
    to_take = (base - dither + _STEP // 2).int(), (scale / _HALF_MOST).float()
    for m, v, scratch, *numbers in _pieces(firsts, seconds, to_take, unpacks=True):
        in_full = v.dtype is torch.float64
        yield m, _take_in_full(m, v, scratch) if in_full else _take(m, v, scratch, *numbers), v


def _pieces(
    firsts: Sequence[Tensor], seconds: Sequence[Tensor], numbers: Sequence[Tensor], *, unpacks: bool
) -> Iterator[tuple[Any, ...]]:
    """Yield moments piece by piece, with scratch memory and the numbers of their elements.

    Many small ones are one piece, by as many kernels as for one; it is written back after it.
    """
    if len(firsts) > 1:
        m, v = _row(firsts), _row(seconds)
        yield m, v, _Scratch(m, unpacks), *(_each(number, firsts) for number in numbers)
        _back(seconds, v)
        if unpacks:
            _back(firsts, m)
    elif unpacks or firsts[0].numel():
        first, second = (one if one.ndim else one.unsqueeze(0) for one in (firsts[0], seconds[0]))
        scratch = _Scratch(first, unpacks)
        for m, v in _chunks(first, second):
            yield m, v, scratch, *numbers


# Bits


def _put(m: Tensor, v: Tensor, scratch: _Scratch, shift: Tensor, factor: Tensor) -> None:
    bits = v.view(torch.int32)
    there = torch.ne(bits, 0, out=scratch.narrow(m).view(torch.int16))
    # Round up to one step, not down to 0: a v of 0 would make a step without bounds.
    bits.add_(shift).clamp_(min=_STEP).bitwise_left_shift_(16 - _DROPPED).mul_(there)
    torch.mul(m, factor, out=_low(v))


def _take(m: Tensor, v: Tensor, scratch: _Scratch, shift: Tensor, factor: Tensor) -> Tensor:
    bits = v.view(torch.int32)
    # The factor has one dimension: with a 0-dim one the product would be computed in float16.
    old = torch.mul(_low(v), factor, out=scratch.wide(m))
    bits.bitwise_right_shift_(16 - _DROPPED).bitwise_and_(_OCTAVES - _STEP)
    there = torch.ne(bits, 0, out=scratch.narrow(m).view(torch.int16))
    bits.add_(shift).mul_(there)  # 0 is the bits of 0.0
    return old


def _put_in_full(m: Tensor, v: Tensor, scratch: _Scratch) -> None:
    wide, narrow = scratch.wide(m), scratch.narrow(m)
    narrow.copy_(v)
    high = wide.view(torch.int64).copy_(narrow.view(torch.int32)).bitwise_left_shift_(32)
    narrow.copy_(m)
    v.view(torch.int64).copy_(narrow.view(torch.int32)).bitwise_and_(0xFFFFFFFF)
    v.view(torch.int64).bitwise_or_(high)


def _take_in_full(m: Tensor, v: Tensor, scratch: _Scratch) -> Tensor:
    wide, narrow = scratch.wide(m), scratch.narrow(m)
    bits = v.view(torch.int64)
    narrow.view(torch.int32).copy_(bits)
    wide.copy_(narrow)
    narrow.view(torch.int32).copy_(bits.bitwise_right_shift_(32))
    v.copy_(narrow)
    return wide


def _low(second: Tensor) -> Tensor:
    """Return the lower half of each float32, as the float16 that it holds."""
    return second.unsqueeze(-1).view(torch.float16)[..., _LOWER]


# Keys


def _rows(
    firsts: Sequence[Tensor], seconds: Sequence[Tensor], counts: Sequence[Tensor | float]
) -> Tensor:
    """Return the row of a key for each, on their device."""
    largest = torch.stack(torch._foreach_norm([*firsts], math.inf)).double()
    scale = torch.exp2(torch.ceil(torch.log2(largest))).clamp(min=_SMALLEST)
    top = torch.stack(torch._foreach_norm([*seconds], math.inf)).view(torch.int32).double()
    base = (top + (_STEP - _OCTAVES)).clamp(min=0)
    return torch.stack([scale, base, _dither(counts, scale)], dim=-1)


def _dither(counts: Sequence[Tensor | float], like: Tensor) -> Tensor:
    """Return one for each count; counts on the host reach the device as kernel arguments."""
    if all(isinstance(count, Tensor) and count.device == like.device for count in counts):
        at = torch.stack([count for count in counts if isinstance(count, Tensor)]).double()
        return torch.floor(torch.frac(at * _GOLDEN) * _STEP)
    numbers = [float(count) * _GOLDEN for count in counts]
    values = [math.floor((number - math.trunc(number)) * _STEP) for number in numbers]
    if len(set(values)) == 1:
        return torch.full_like(like, values[0])
    return torch.stack([torch.full_like(like[0], value) for value in values])


# Pieces


class _Scratch:
    """Memory for one piece: in the moments' dtype, and in a dtype of half its bits."""

    def __init__(self, like: Tensor, unpacks: bool) -> None:
        size = max((m.numel() for m, _ in _chunks(like, like)), default=0)
        in_full = like.dtype is torch.float64
        half = torch.float32 if in_full else torch.float16
        self._wide = torch.empty(
            size if unpacks or in_full else 0, dtype=like.dtype, device=like.device
        )
        self._narrow = torch.empty(size, dtype=half, device=like.device)

    def wide(self, piece: Tensor) -> Tensor:
        return self._wide[: piece.numel()].view(piece.shape)

    def narrow(self, piece: Tensor) -> Tensor:
        return self._narrow[: piece.numel()].view(piece.shape)


def _row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _back(tensors: Sequence[Tensor], row: Tensor) -> None:
    pieces = row.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(
        list(tensors), [p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)]
    )


def _each(numbers: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Repeat each number as often as its tensor has elements."""
    sizes = [tensor.numel() for tensor in tensors]
    repeats = torch.tensor(sizes).to(numbers.device, non_blocking=True)
    return numbers.repeat_interleave(repeats, output_size=sum(sizes))


def _chunks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both tensors in pieces of the same elements, large enough to be worth a kernel."""
    if first.numel() <= _CHUNK:
        yield first, second
        return
    rows = max(1, _CHUNK // (first.numel() // first.shape[0]))
    yield from zip(first.split(rows), second.split(rows), strict=True)
