"""Adam's two old moments in the memory of the second one, while a window is open.

At the close of a window Adam needs three numbers for each element: the old m, the old v, and the
gradient G. The memory of the moments has room for two. But m grows into what it is to be while the
gradients are added to it, and the old m is needed only to find G again, for v; the old v is an
average that knows its own noise. Both do with 16 bits, and share the 32 of `exp_avg_sq`:

    m    as float16, relative to the largest of its tensor
    v    the bits of its float32, which are a logarithm in steps: 64 powers of two below the
         largest, 1024 steps in each

v is rounded in every window, so rounding must not lean to one side: where v changes by less than a
step, rounding to the nearest would hold it still for ever. A dither that goes with the number of
the update is added before and taken off after, so that the errors of many updates cancel.

In float64 there are 64 bits, and both are kept as float32, without scale and dither.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]

_CHUNK = 2**22
"""Elements that are worked on together: a few temporaries of this size are all that it takes."""
_DROPPED = 13
"""Low bits of a float32 that v does without: 10 of its 23 are left."""
_STEP = 2**_DROPPED
_OCTAVES = 2**29
"""64 powers of two, in the bits of a float32."""
_GOLDEN = 0.6180339887498949
_HALF_MOST = 2.0**15
"""What the largest m becomes in float16, which ends at 65504."""
_SMALLEST = 2.0**-100
"""A scale of m whose inverse is still a float32."""


def pack(first: Tensor, second: Tensor, count: Tensor | float) -> Tensor:
    """Put both moments into the memory of `second`; the numbers that `unpack` asks for.

    `count` is the number of updates so far; nothing is read from the device. All memory that it
    takes is taken before the first change, so that it fails with both moments intact.
    """
    scratch = _Scratch(first)
    if second.dtype is torch.float64:
        for m, v in _chunks(first, second):
            wide, narrow = scratch.pair(m)
            narrow.copy_(v)
            high = wide.view(torch.int64).copy_(narrow.view(torch.int32)).bitwise_left_shift_(32)
            narrow.copy_(m)
            v.view(torch.int64).copy_(narrow.view(torch.int32)).bitwise_and_(0xFFFFFFFF)
            v.view(torch.int64).bitwise_or_(high)
        return torch.zeros(3, dtype=torch.float64)
    if not first.numel():
        return torch.zeros(3, dtype=torch.float64)
    key = _key(first, second, count)
    scale, base, dither = key.unbind()
    shift, factor = (dither - base).int(), (_HALF_MOST / scale).float()
    for m, v in _chunks(first, second):
        wide, narrow = scratch.pair(m)
        bits = v.view(torch.int32)
        there = torch.ne(bits, 0, out=wide.view(torch.int32))
        # Too small is 1 and not 0: a v that vanishes would make a step without bounds.
        bits.add_(shift).bitwise_right_shift_(_DROPPED).clamp_(min=1).mul_(there)
        narrow.copy_(torch.mul(m, factor, out=wide))
        low = wide.view(torch.int32).copy_(narrow.view(torch.int16)).bitwise_and_(0xFFFF)
        bits.bitwise_left_shift_(16).bitwise_or_(low)
    return key


def unpack(first: Tensor, second: Tensor, key: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Pieces of the moments: the first as it is now, the old first, and the old v in `second`.

    The old first is there until the next piece is asked for, and may be written to.
    """
    scratch = _Scratch(first)
    if second.dtype is torch.float64:
        for m, v in _chunks(first, second):
            wide, narrow = scratch.pair(m)
            bits = v.view(torch.int64)
            narrow.view(torch.int32).copy_(bits)
            wide.copy_(narrow)
            narrow.view(torch.int32).copy_(bits.bitwise_right_shift_(32))
            v.copy_(narrow)
            yield m, wide, v
        return
    scale, base, dither = key.unbind()
    shift, factor = (base - dither + _STEP // 2).int(), (scale / _HALF_MOST).float()
    for m, v in _chunks(first, second):
        wide, narrow = scratch.pair(m)
        bits = v.view(torch.int32)
        narrow.view(torch.int16).copy_(bits)
        bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        there = torch.ne(bits, 0, out=wide.view(torch.int32))
        bits.bitwise_left_shift_(_DROPPED).add_(shift).mul_(there)  # 0 is the bits of 0.0
        wide.copy_(narrow).mul_(factor)
        yield m, wide, v


class _Scratch:
    """Memory for one piece: in the moments' dtype, and in that of half its bits."""

    def __init__(self, like: Tensor) -> None:
        size = max((m.numel() for m, _ in _chunks(like, like)), default=0)
        half = torch.float32 if like.dtype is torch.float64 else torch.float16
        self._wide = torch.empty(size, dtype=like.dtype, device=like.device)
        self._narrow = torch.empty(size, dtype=half, device=like.device)

    def pair(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Both, in the shape of the piece."""
        count = piece.numel()
        return self._wide[:count].view(piece.shape), self._narrow[:count].view(piece.shape)


def _key(first: Tensor, second: Tensor, count: Tensor | float) -> Tensor:
    """The scale of m, the bits that v is counted from, and the dither, on the moments' device."""
    largest = torch.linalg.vector_norm(first, float("inf")).double()
    scale = torch.exp2(torch.ceil(torch.log2(largest))).clamp(min=_SMALLEST)
    top = second.amax().view(torch.int32).double()
    base = (top + (_STEP - _OCTAVES)).clamp(min=0)
    at = torch.as_tensor(count, dtype=torch.float64, device=first.device)
    dither = torch.floor(torch.frac(at * _GOLDEN) * _STEP)
    return torch.stack([scale, base, dither.to(scale.device)])


def _chunks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors in pieces that see the same elements, of a size that is worth a kernel."""
    if first.numel() <= _CHUNK or first.ndim == 0:
        yield first, second
        return
    rows = max(1, _CHUNK // (first.numel() // first.shape[0]))
    yield from zip(first.split(rows), second.split(rows), strict=True)
