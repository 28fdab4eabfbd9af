"""The look before a loss is split: do the losses of a few samples add up?

`accumulate` is most often traced (`jax.jit`), where arrays have shapes and no values. So the loss
is traced for a few samples, and run at once on values: given ones where there are any, else made-up
ones. A loss that is a sum over its samples adds up on any values, so nothing is lost by that.

    L(a, b, c, d) = L(a) + L(b) + L(c) + L(d)     without random numbers
    L(a, b) + L(c, d) = L(c, b) + L(a, d)         with them: runs of one shape draw alike

The same holds for the gradient, of which one weighted sum is compared.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wholebatch.errors import LossError

_log = logging.getLogger("wholebatch")

_SAMPLES = 8
_MOST_BYTES = 2**31  # of made-up values: a larger model would not fit beside itself
_DRAWS = ("random_", "threefry", "rng_")
_NARROW = ("bf16[", "f16[", "f8")

_Loss = Callable[..., tuple[Any, Any]]
_Places = Sequence[int]
Total = tuple[float, ...]  # units, loss, gradient; the norms of the gradients of loss and units


def look_at_loss(
    loss: _Loss, args: Sequence[Any], batched: _Places, size: int, wanted: _Places
) -> None:
    """Refuse a loss whose total, units or gradient of some samples is not that of their parts.

    `loss(*args)` returns total and units; the arguments at `batched` have `size` samples, and those
    at `wanted` get the gradient. A loss that cannot be run so (made-up values that are not finite,
    a collective, a very large model) is not looked at, which is logged.
    """
    few = min(size, _SAMPLES)
    few -= few % 4 if few >= 4 else few % 2
    if few < 2:
        return
    try:
        with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
            runs = _Runs(loss, args, batched, few, wanted)
            found = runs.found()
    except Exception as error:  # most often the loss's own, and the trace will raise it
        _log.warning("not tested if micro-batches add up to the whole batch: %r", error)
        return
    totals = [total for side in found for total in side]
    if any(total[4] > 1e-6 * abs(total[0]) for total in totals):
        raise LossError(_LEARNT)
    for at, (what, by, close) in enumerate((("units", 0, 1), ("loss", 1, 1), ("gradient", 3, 10))):
        one, other = (sum(total[at] for total in side) for side in found)
        size_of = sum(abs(total[by]) for total in totals)
        if not math.isfinite(size_of):
            _log.warning(
                "not tested if micro-batches add up to the whole batch: the loss of %d samples "
                "is not finite on the values of the test (random ones under jit)",
                few,
            )
            return
        if abs(one - other) > close * (3e-2 if runs.narrow else 1e-5) * size_of:
            raise LossError(_MESSAGE.format(what=what, few=few, one=one, other=other))


_MESSAGE = (
    "the {what} of {few} samples sums to {one:.6g}, and to {other:.6g} when they are split "
    "otherwise (on made-up values where none were given): the loss compares samples (a contrastive "
    "loss, a statistic of the batch), or it is a mean over other units than those counted. No sum "
    "over micro-batches is the loss of their batch. If only the gradient differs, a statistic of "
    "the batch is in stop_gradient, or a custom gradient depends on the batch or is not linear; "
    "audit=False turns this look off"
)
_LEARNT = (
    "the units depend on the parameters: the gradient of the mean goes through the sum of all "
    "units, which no micro-batch knows. If they are constants, give jax.lax.stop_gradient(units); "
    "audit=False turns this look off"
)


class _Runs:
    """Runs a loss on some rows of made-up or given values."""

    def __init__(
        self, loss: _Loss, args: Sequence[Any], batched: _Places, few: int, wanted: _Places
    ) -> None:
        from numpy.random import default_rng

        self._loss, self._few = loss, few
        self._made: dict[int, tuple[Any, Any]] = {}  # by id, with the tracer so that it lives on
        self._random = default_rng(0)
        self._bytes = 0
        leaves, self._tree = jax.tree.flatten(list(args))
        owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        self._is_batch = of_batch = [i in batched for i in owners]
        self._is_wanted = [
            i in wanted and _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
            for i, leaf in zip(owners, leaves, strict=True)
        ]
        self._leaves = [
            self._value(leaf, rows=few if batch else None)
            for leaf, batch in zip(leaves, of_batch, strict=True)
        ]
        self._compiled: dict[int, Any] = {}  # by the number of rows
        self._draws = self.narrow = False

    def found(self) -> tuple[list[Total], list[Total]]:
        """Return the totals and units of the same samples, run together in two ways."""
        part = max(self._few // 4, 1)
        parts = [list(range(at, at + part)) for at in range(0, self._few, part)]
        whole = self._run(list(range(part * len(parts))))
        if not self._draws:
            return [whole], [self._run(rows) for rows in parts]
        if len(parts) < 4:
            return [whole], [whole]
        a, b, c, d = parts
        return [self._run(a + b), self._run(c + d)], [self._run(c + b), self._run(a + d)]

    def _run(self, rows: list[int]) -> Total:
        chosen = [
            leaf[jnp.asarray(rows)] if batch else leaf
            for leaf, batch in zip(self._leaves, self._is_batch, strict=True)
        ]
        arrays = [leaf for leaf in chosen if _is_array(leaf)]
        if len(rows) not in self._compiled:
            self._compiled[len(rows)] = self._traced(rows, chosen, arrays)
        return tuple(float(one) for one in self._compiled[len(rows)](*arrays))

    def _traced(self, rows: list[int], chosen: list[Any], arrays: list[Any]) -> Callable[..., Any]:
        def totals(*arrays: Any) -> tuple[Any, ...]:
            rest = iter(arrays)
            given = [next(rest) if _is_array(leaf) else leaf for leaf in chosen]
            places = [place for place, is_wanted in enumerate(self._is_wanted) if is_wanted]

            def pair(*trained: Any) -> tuple[Any, Any]:
                for place, leaf in zip(places, trained, strict=True):
                    given[place] = leaf
                total, units = self._loss(*jax.tree.unflatten(self._tree, given))
                return total, jnp.asarray(units, total.dtype)

            (total, units), pull = jax.vjp(pair, *(given[place] for place in places))
            seed = jnp.asarray(1.0 if len(rows) == self._few else 0.25, total.dtype)
            slopes, none = pull((seed, 0 * seed)), pull((0 * seed, seed))
            mixed = sum(jnp.real(one).ravel() @ jnp.cos(jnp.arange(one.size)) for one in slopes)
            sizes = [jnp.sqrt(sum((abs(one) ** 2).sum() for one in of)) for of in (slopes, none)]
            return units, total, mixed / seed, sizes[0] / seed, sizes[1] / seed

        traced = jax.make_jaxpr(totals)(*arrays)
        program = str(traced.jaxpr)
        self._draws = any(word in program for word in _DRAWS)
        self.narrow = any(word in program for word in _NARROW)
        # What the function closes over may be traced too (a key, a learning rate).
        closed_over = [self._value(const, rows=None) for const in traced.consts]
        run = jax.jit(lambda *given: jax.core.eval_jaxpr(traced.jaxpr, *given))
        return lambda *arrays: run(closed_over, *arrays)

    def _value(self, leaf: Any, rows: int | None) -> Any:
        """Return what stands for a leaf: itself, its first rows, or made-up values."""
        if not isinstance(leaf, jax.core.Tracer):
            if rows is not None:
                return jnp.asarray(leaf)[:rows]
            return leaf
        if id(leaf) not in self._made:
            shape = leaf.shape if rows is None else (rows, *leaf.shape[1:])
            self._made[id(leaf)] = (leaf, self._made_up(shape, leaf.dtype))
        return self._made[id(leaf)][1]

    def _made_up(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            key = jax.random.key(0)
            return jax.random.split(key, shape) if shape else key
        self._bytes += math.prod(shape) * dtype.itemsize
        if self._bytes > _MOST_BYTES:
            raise MemoryError(f"{self._bytes} bytes of made-up values")
        if not jnp.issubdtype(dtype, jnp.inexact):  # masks, labels, tokens
            made = jnp.asarray(self._random.uniform(size=shape) < 0.7)
            made = made.at[..., :1].set(True) if shape else made  # no sample is without units
            return made.astype(dtype)
        if len(shape) < 2:  # biases and scales
            return jnp.asarray(self._random.uniform(0.5, 1.5, shape), dtype)
        # Of a size at which layers neither vanish nor explode.
        return jnp.asarray(self._random.normal(size=shape) / math.sqrt(shape[-2] or 1), dtype)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
