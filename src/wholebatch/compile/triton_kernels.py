"""The Triton kernels of the cross-entropy and of the statistics of logits, and their launches.

Triton ships with torch's CUDA builds, so this module is imported only for a CUDA device. What
`cross_entropy.py` and `token_statistics.py` compute on other devices is the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_ENTROPY_BLOCK = 8192
_NUMBERS_PER_WARP = 512


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def cross_entropy_rows(  # type: ignore[no-untyped-def]
    logits, labels, seed, losses, classes, stride, ignored, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    start = logits + row * stride
    lanes = tl.arange(0, block)
    if label == ignored:
        for first in range(0, classes, block):
            here = first + lanes
            nothing = tl.zeros([block], dtype=logits.dtype.element_ty)
            tl.store(start + here, nothing, mask=here < classes)
        tl.store(losses + row, 0.0)
        return
    # A label out of range would read outside the row: return NaN as its loss instead.
    known = (label >= 0) & (label < classes)
    at_label = tl.load(start + label, mask=known, other=float("nan")).to(tl.float32)
    largest = float("-inf")
    total = 0.0
    for first in range(0, classes, block):
        here = first + lanes
        x = tl.load(start + here, mask=here < classes, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    normaliser = largest + tl.log(total)
    tl.store(losses + row, normaliser - at_label)
    factor = tl.load(seed).to(tl.float32)
    for first in range(0, classes, block):  # The row is still in the cache.
        here = first + lanes
        x = tl.load(start + here, mask=here < classes, other=0.0).to(tl.float32)
        share = tl.exp(x - normaliser)
        gradient = tl.where(here == label, share - 1.0, share) * factor
        tl.store(start + here, gradient.to(logits.dtype.element_ty), mask=here < classes)


def cross_entropy(logits: Tensor, labels: Tensor, seed: Tensor, ignored: int) -> Tensor:
    """Return the loss of every row, and overwrite `logits` with the gradient times the seed."""
    rows, classes = logits.shape
    if logits.stride(1) != 1:
        dense = logits.contiguous()
        losses = cross_entropy(dense, labels, seed, ignored)
        logits.copy_(dense)
        return losses
    labels = labels.contiguous()  # The kernel reads them with stride 1.
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(classes), _ENTROPY_BLOCK)
    warps = min(max(block // _NUMBERS_PER_WARP, 1), 32)
    if rows:
        kernel: Any = cross_entropy_rows[(rows,)]
        sizes = classes, logits.stride(0)  # A padded product leaves a gap after each row.
        kernel(logits, labels, seed, losses, *sizes, ignored, block=block, num_warps=warps)
    return losses


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def statistics_of_rows(  # type: ignore[no-untyped-def]
    logits, entropies, likeliest, means, classes, stride, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    lanes = tl.arange(0, block)
    largest = -3e38  # Finite: a block of -inf alone adds nothing.
    place = 0
    whole = 0.0  # of the logits
    total = 0.0  # of exp(x - largest)
    product = 0.0  # of (x - largest) exp(x - largest)
    for first in range(0, classes, block):
        here = first + lanes
        x = tl.load(start + here, mask=here < classes, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        place = tl.where(top > largest, first + tl.argmax(x, 0), place)
        larger = tl.maximum(largest, top)
        moved = largest - larger
        apart = x - larger
        share = tl.exp(apart)
        product = (product + total * moved) * tl.exp(moved)
        product += tl.sum(tl.where(share > 0, apart * share, 0.0), 0)
        total = total * tl.exp(moved) + tl.sum(share, 0)
        whole += tl.sum(tl.where(here < classes, x, 0.0), 0)
        largest = larger
    tl.store(entropies + row, tl.log(total) - product / total)
    tl.store(likeliest + row, place)
    tl.store(means + row, whole / classes)


def token_statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entropy, the most likely class and the mean of every row, read once."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, classes = logits.shape
    entropies, means = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    likeliest = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(triton.next_power_of_2(classes), _ENTROPY_BLOCK)
    warps = min(max(block // _NUMBERS_PER_WARP, 1), 32)
    if rows:
        kernel: Any = statistics_of_rows[(rows,)]
        results = entropies, likeliest, means
        kernel(logits, *results, classes, logits.stride(0), block=block, num_warps=warps)
    return entropies, likeliest, means
