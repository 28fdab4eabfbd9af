"""Triton kernels, each with the function that launches it.

Triton ships with torch's CUDA builds, so this module is imported only for a CUDA device. The
modules `biased_attention`, `cross_entropy`, `gelu` and `layer_norm` compute the same results with
torch operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

if TYPE_CHECKING:
    from wholebatch.compile.layer_norm import Read


@contextmanager
def only_compiled() -> Iterator[None]:
    """Let a launch within this context compile its kernel into Triton's cache, and run nothing."""
    jit: Any = import_module("triton.runtime.jit")
    driver: Any = import_module("triton.runtime").driver
    plain = jit.JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kinds = [jit.MockTensor(one.dtype) if isinstance(one, Tensor) else one for one in args]
        compiled = plain(kernel, *kinds, grid=grid, warmup=True, **options)
        with suppress(Exception):  # Triton compiles a function in C for each kind of launch, too.
            driver.active.launcher_cls(compiled.src, compiled.metadata)
        return compiled

    jit.JITFunction.run = run
    try:
        yield
    finally:
        jit.JITFunction.run = plain


_ENTROPY_BLOCK = 8192
_NUMBERS_PER_WARP = 512
_SUM_COLUMNS, _SUM_LINES = 16, 128
"""The tile of one program of `column_sums`."""
_GELU_ROWS, _GELU_COLUMNS = 2, 256
"""The tile of one program of `gelu_backward_columns`."""
_GELU_PROGRAMS = 16  # per processor
_NORM_WARPS_PER_PROCESSOR = 8
_NORM_FEWEST_ROWS = 4
"""The least number of rows per program: every program's partial sums are written and read again."""


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
        made = logits.contiguous()
        losses = cross_entropy(made, labels, seed, ignored)
        logits.copy_(made)
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


@cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def column_sums(  # type: ignore[no-untyped-def]
    partials, totals, programs, columns,
    adds: tl.constexpr, block_of_lines: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    here = tl.program_id(0) * block + tl.arange(0, block)
    inside = here < columns
    lines = tl.arange(0, block_of_lines)
    start = partials + which * programs * columns
    total = tl.zeros([block_of_lines, block], dtype=tl.float32)
    for first in range(0, programs, block_of_lines):
        line = first + lines
        there = (line < programs)[:, None] & inside[None, :]
        total += tl.load(start + line[:, None] * columns + here[None, :], mask=there, other=0.0)
    column = tl.sum(total, 0)
    target = totals + which * columns + here
    if adds:
        column += tl.load(target, mask=inside)
    tl.store(target, column, mask=inside)


def _sum_columns(partials: Tensor, totals: Tensor, *, adds: bool) -> None:
    """Set `totals[i]` to `partials[i].sum(0)`, or add it if `adds`.

    The order of the sum is fixed, so that the same micro-batch gives the same bits.
    """
    number, programs, columns = partials.shape
    kernel: Any = column_sums[(triton.cdiv(columns, _SUM_COLUMNS), number)]
    kernel(
        partials, totals, programs, columns,
        adds=adds, block_of_lines=_SUM_LINES, block=_SUM_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gelu_backward_columns(  # type: ignore[no-untyped-def]
    gradients, inputs, outs, partials, rows, columns,
    linear: tl.constexpr, cubic: tl.constexpr, is_tanh: tl.constexpr,
    block_of_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0) * block + tl.arange(0, block)
    inside = here < columns
    lines = tl.arange(0, block_of_rows)
    stride = tl.num_programs(1) * block_of_rows
    total = tl.zeros([block_of_rows, block], dtype=tl.float32)
    for first in range(tl.program_id(1) * block_of_rows, rows, stride):
        line = first + lines
        at = line[:, None].to(tl.int64) * columns + here[None, :]
        there = (line < rows)[:, None] & inside[None, :]
        x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(gradients + at, mask=there, other=0.0).to(tl.float32)
        squared = x * x
        if is_tanh:
            # s + x s (1 - s) (2u)′, where s is the logistic function of 2u.
            share = tl.sigmoid(x * (linear + cubic * squared))
            inner = linear + 3.0 * cubic * squared
            slope = share + x * share * (1.0 - share) * inner
        else:
            density = 0.3989422804014327 * tl.exp(-0.5 * squared)
            slope = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) + x * density
        out = (g * slope).to(outs.dtype.element_ty)
        tl.store(outs + at, out, mask=there)
        total += out.to(tl.float32)
    column = tl.sum(total, 0)
    tl.store(partials + tl.program_id(1) * columns + here, column, mask=inside)


def gelu_backward(
    gradient: Tensor, x: Tensor, bias_sum: Tensor, *, is_tanh: bool, linear: float, cubic: float
) -> Tensor:
    """Return the gradient of `x`, and add the sum of its rows to `bias_sum`."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    if not rows:
        return out
    wide = triton.cdiv(columns, _GELU_COLUMNS)
    high = min(
        triton.cdiv(_processors(x.device) * _GELU_PROGRAMS, wide), triton.cdiv(rows, _GELU_ROWS)
    )
    partials = torch.empty(high, columns, dtype=torch.float32, device=x.device)
    kernel: Any = gelu_backward_columns[(wide, high)]
    kernel(
        gradient, x, out, partials, rows, columns,
        linear=linear, cubic=cubic, is_tanh=is_tanh,
        block_of_rows=_GELU_ROWS, block=_GELU_COLUMNS, num_warps=4,
    )  # fmt: skip
    _sum_columns(partials[None], bias_sum[None], adds=True)
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def layer_norm_rows(  # type: ignore[no-untyped-def]
    gradients, inputs, addends, means, rstds, weight, residuals, outs, lows, partials,
    rows, columns,
    has_addend: tl.constexpr, has_mean: tl.constexpr, has_weight: tl.constexpr,
    has_residual: tl.constexpr, has_low: tl.constexpr,
    sums_weight: tl.constexpr, sums_bias: tl.constexpr, sums_low: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    here = tl.arange(0, block)
    inside = here < columns
    if has_weight:
        w = tl.load(weight + here, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([block], dtype=tl.float32)
    of_bias = tl.zeros([block], dtype=tl.float32)
    of_low = tl.zeros([block], dtype=tl.float32)
    start = program.to(tl.int64) * columns
    stride = programs.to(tl.int64) * columns
    # Prefetch: load the next row before working on this one.
    g_next = tl.load(gradients + start + here, mask=inside, other=0.0)
    x_next = tl.load(inputs + start + here, mask=inside, other=0.0)
    if has_addend:
        a_next = tl.load(addends + start + here, mask=inside, other=0.0)
    if has_residual:
        r_next = tl.load(residuals + start + here, mask=inside, other=0.0)
    for row in range(program, rows, programs):
        g = g_next.to(tl.float32)
        x = x_next
        if has_addend:
            x += a_next.to(tl.float32)
        rstd = tl.load(rstds + row)
        if has_mean:
            x -= tl.load(means + row)
        following = start + stride
        more = inside & (row + programs < rows)
        g_next = tl.load(gradients + following + here, mask=more, other=0.0)
        x_next = tl.load(inputs + following + here, mask=more, other=0.0)
        if has_addend:
            a_next = tl.load(addends + following + here, mask=more, other=0.0)
        if has_residual:
            residual = r_next
            r_next = tl.load(residuals + following + here, mask=more, other=0.0)
        normal = tl.where(inside, x * rstd, 0.0)
        if sums_weight:
            of_weight += g * normal
        if sums_bias:
            of_bias += g
        if has_weight:
            g *= w
        across = tl.sum(g * normal, 0) / columns
        if has_mean:
            g -= tl.sum(g, 0) / columns
        out = (g - normal * across) * rstd
        if has_residual:
            out += residual
        tl.store(outs + start + here, out, mask=inside)
        if has_low:
            low = out.to(lows.dtype.element_ty)
            tl.store(lows + start + here, low, mask=inside)
            if sums_low:
                of_low += low.to(tl.float32)
        start = following
    at = partials + program.to(tl.int64) * columns + here
    if sums_weight:
        tl.store(at, of_weight, mask=inside)
    if sums_bias:
        tl.store(at + stride, of_bias, mask=inside)
    if sums_low:
        tl.store(at + 2 * stride, of_low, mask=inside)


def layer_norm_backward(
    read: Read, low: Tensor | None, total: Tensor, sums: list[bool], into: Tensor | None
) -> Tensor:
    """Return the gradient of `x` plus `residual`, and write it to `low` too.

    The sums of the rows go to `total`; a single one is added to `into`, if given.
    """
    x = read.x
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    if not rows:
        total.zero_()
        return out
    block = triton.next_power_of_2(columns)
    warps = min(max(block // _NUMBERS_PER_WARP, 1), 16)
    programs = _processors(x.device) * max(_NORM_WARPS_PER_PROCESSOR // warps, 1)
    programs = min(programs, triton.cdiv(rows, _NORM_FEWEST_ROWS))
    partials = torch.empty(3, programs, columns, dtype=torch.float32, device=x.device)
    kernel: Any = layer_norm_rows[(programs,)]
    kernel(
        *read, out, low, partials, rows, columns,
        has_addend=read.addend is not None, has_mean=read.mean is not None,
        has_weight=read.weight is not None, has_residual=read.residual is not None,
        has_low=low is not None, sums_weight=sums[0], sums_bias=sums[1], sums_low=sums[2],
        block=block, num_warps=warps,
    )  # fmt: skip
    if into is not None:
        _sum_columns(partials[sums.index(True)][None], into[None], adds=True)
    elif any(sums):
        _sum_columns(partials, total, adds=False)
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _hash(number):  # type: ignore[no-untyped-def]
    number = number.to(tl.uint32)
    number = number ^ (number >> 16)
    number = number * 0x7FEB352D
    number = number ^ (number >> 15)
    number = number * 0x846CA68B
    return number ^ (number >> 16)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _share_kept(draw, at, below, grown):  # type: ignore[no-untyped-def]
    """Return the dropout factors of scores: `grown` for those that are kept, else 0."""
    seed = _hash((tl.load(draw) * 16777216.0).to(tl.int32))
    drawn = _hash(at.to(tl.uint32) + seed)
    return tl.where((drawn >> 1).to(tl.int32) >= below, grown, 0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tile(matrix, lines, stride, d, inside):  # type: ignore[no-untyped-def]
    """Return these lines of a matrix, and zeros for those that are not inside."""
    return tl.load(matrix + lines[:, None] * stride + d[None, :], mask=inside[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def biased_attention_rows(  # type: ignore[no-untyped-def]
    queries, keys, values, biases, draw, outs, normalisers,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, bb, bh, bm, bn, ob, oh, om,
    heads, rows, columns, below, grown, scale,
    drops: tl.constexpr, size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    batch, head = which // heads, which % heads
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    d = tl.arange(0, size)
    in_rows = m < rows
    q = _tile(queries + batch * qb + head * qh, m, qm, d, in_rows)
    largest = tl.full([block_m], float("-inf"), dtype=tl.float32)
    total = tl.zeros([block_m], dtype=tl.float32)
    out = tl.zeros([block_m, size], dtype=tl.float32)
    key = keys + batch * kb + head * kh
    value = values + batch * vb + head * vh
    bias = biases + batch * bb + head * bh + m[:, None].to(tl.int64) * bm
    for first in range(0, columns, block_n):
        n = first + tl.arange(0, block_n)
        inside = n < columns
        k = tl.load(key + n[None, :] * kn + d[:, None], mask=inside[None, :], other=0.0)
        there = in_rows[:, None] & inside[None, :]
        b = tl.load(bias + n[None, :] * bn, mask=there, other=float("-inf")).to(tl.float32)
        scores = tl.dot(q, k) * scale + b
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # A row may be masked altogether.
        shares = tl.exp(scores - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(shares, 1)
        if drops:
            at = (which.to(tl.int32) * rows + m[:, None]) * columns + n[None, :]
            shares *= _share_kept(draw, at, below, grown)
        v = _tile(value, n, vn, d, inside)
        out = tl.dot(shares.to(v.dtype), v, out * shrink[:, None])
        largest = larger
    out = out / tl.where(total > 0.0, total, 1.0)[:, None]
    base = tl.where(total > 0.0, largest + tl.log(tl.where(total > 0.0, total, 1.0)), float("inf"))
    tl.store(normalisers + which * rows + m, base, mask=in_rows)
    tl.store(
        outs + batch * ob + head * oh + m[:, None] * om + d[None, :],
        out.to(outs.dtype.element_ty), mask=in_rows[:, None],
    )  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, head and row of each; those of the last dimension must be 1."""
    return [stride for one in tensors for stride in one.stride()[:3]]


def _dropping(dropout: float) -> tuple[int, float]:
    """Return the 31-bit number below which a score is dropped, and the factor of the others."""
    return int(dropout * 2**31), 1.0 / (1.0 - dropout)


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, draw: Tensor | None,
    out: Tensor, normaliser: Tensor, *, dropout: float, scale: float,
) -> None:  # fmt: skip
    """Write softmax(q kᵀ scale + bias) v to `out`, and the scores' log-sum-exp to `normaliser`."""
    q, k, v = map(_in_rows, (q, k, v))
    batch, heads, rows, size = q.shape
    columns = k.shape[2]
    block_m, block_n = 128 if rows > 64 else 64, 64
    kernel: Any = biased_attention_rows[(triton.cdiv(rows, block_m), batch * heads)]
    kernel(
        q, k, v, bias, draw, out, normaliser,
        *_strides(q, k, v), *bias.stride(), *_strides(out),
        heads, rows, columns, *_dropping(dropout), scale,
        drops=draw is not None, size=size, block_m=block_m, block_n=block_n, num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def biased_attention_columns(  # type: ignore[no-untyped-def]
    gradients, queries, keys, values, biases, outs, normalisers, draw, of_keys, of_values, scores_,
    gb, gh, gm, qb, qh, qm, kb, kh, kn, vb, vh, vn, bb, bh, bm, bn, ob, oh, om,
    dkb, dkh, dkn, dvb, dvh, dvn,
    heads, rows, columns, below, grown, scale,
    drops: tl.constexpr, size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    batch, head = which // heads, which % heads
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    d = tl.arange(0, size)
    inside = n < columns
    k = _tile(keys + batch * kb + head * kh, n, kn, d, inside)
    v = _tile(values + batch * vb + head * vh, n, vn, d, inside)
    dk = tl.zeros([block_n, size], dtype=tl.float32)
    dv = tl.zeros([block_n, size], dtype=tl.float32)
    query = queries + batch * qb + head * qh
    upstream = gradients + batch * gb + head * gh
    made = outs + batch * ob + head * oh
    bias = biases + batch * bb + head * bh + n[:, None] * bn
    target = scores_ + which * rows * columns + n[:, None]
    for first in range(0, rows, block_m):
        m = first + tl.arange(0, block_m)
        in_rows = m < rows
        q = _tile(query, m, qm, d, in_rows)
        g = _tile(upstream, m, gm, d, in_rows)
        o = _tile(made, m, om, d, in_rows)
        along = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        base = tl.load(normalisers + which * rows + m, mask=in_rows, other=float("inf"))
        there = inside[:, None] & in_rows[None, :]
        across = m[None, :].to(tl.int64)
        b = tl.load(bias + across * bm, mask=there, other=float("-inf")).to(tl.float32)
        shares = tl.exp(tl.dot(k, tl.trans(q)) * scale + b - base[None, :])
        of_shares = tl.dot(v, tl.trans(g))
        kept = shares
        if drops:
            at = (which.to(tl.int32) * rows + m[None, :]) * columns + n[:, None]
            factor = _share_kept(draw, at, below, grown)
            kept = shares * factor
            of_shares *= factor
        dv = tl.dot(kept.to(g.dtype), g, dv)
        of_scores = (shares * (of_shares - along[None, :])).to(scores_.dtype.element_ty)
        tl.store(target + across * columns, of_scores, mask=there)
        dk = tl.dot(of_scores.to(q.dtype), q, dk)
    at_k = of_keys + batch * dkb + head * dkh + n[:, None] * dkn + d[None, :]
    at_v = of_values + batch * dvb + head * dvh + n[:, None] * dvn + d[None, :]
    tl.store(at_k, (dk * scale).to(of_keys.dtype.element_ty), mask=inside[:, None])
    tl.store(at_v, dv.to(of_values.dtype.element_ty), mask=inside[:, None])


def biased_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor,
    normaliser: Tensor, draw: Tensor | None, dk: Tensor, dv: Tensor, scores: Tensor,
    *, dropout: float, scale: float,
) -> None:  # fmt: skip
    """Write the gradients of the keys, the values and the scores; `scores` is contiguous."""
    gradient, q, k, v = map(_in_rows, (gradient, q, k, v))
    batch, heads, rows, size = q.shape
    columns = k.shape[2]
    block_m, block_n = 64, 64
    kernel: Any = biased_attention_columns[(triton.cdiv(columns, block_n), batch * heads)]
    kernel(
        gradient, q, k, v, bias, out, normaliser, draw, dk, dv, scores,
        *_strides(gradient, q, k, v), *bias.stride(), *_strides(out, dk, dv),
        heads, rows, columns, *_dropping(dropout), scale,
        drops=draw is not None, size=size, block_m=block_m, block_n=block_n, num_warps=4,
    )  # fmt: skip
