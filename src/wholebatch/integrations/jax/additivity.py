"""Test on a few samples that a loss adds up, before it is split.

    L(a, b, c, d) = L(a) + L(b) + L(c) + L(d)     without random numbers
    L(a, b) + L(c, d) = L(c, b) + L(a, d)         with them: runs of the same shape draw alike

The same holds for the gradient, of which one weighted sum is compared. The test needs values, so it
runs on the first real batch that comes outside `jax.jit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wholebatch.errors import LossError

_SAMPLES = 8
# What the text of a jaxpr has in it where random numbers are drawn, and where 16-bit values are.
_RANDOM = ("random_", "threefry", "rng_")
_16_BIT = ("bf16[", "f16[", "f8")

_Loss = Callable[..., tuple[Any, Any]]
Total = tuple[float, ...]  # units, loss, gradient; the norms of the gradients of loss and units


_UNDER_JIT = (
    "under jax.jit there are no values. Call the function of accumulate() once on a real batch "
    "outside jit, before the first step, so that a loss that compares samples is refused; "
    "audit=False leaves the test out"
)


def untested_because(
    loss: _Loss, args: Sequence[Any], batched: Sequence[int], size: int, wanted: Sequence[int]
) -> str | None:
    """Refuse a loss whose total, units or gradient of some samples is not that of their parts.

    `loss(*args)` returns total and units; the arguments at `batched` have `size` samples, and those
    at `wanted` get the gradient. Return why the loss could not be tested, or None if it was.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        return _UNDER_JIT
    few = min(size, _SAMPLES)
    few -= few % 4 if few >= 4 else few % 2
    if few < 2:
        return "the batch has one sample"
    try:
        with jax.default_matmul_precision("highest"):
            samples = _Samples(loss, args, batched, few, wanted)
            sides = samples.totals()
    except jax.errors.JAXTypeError:  # The loss closes over a traced value, such as a key.
        return _UNDER_JIT
    except Exception as error:  # Most often the loss's own: the whole batch will raise it too.
        return repr(error)
    totals = [total for side in sides for total in side]
    if any(total[4] > 1e-6 * abs(total[0]) for total in totals):
        raise LossError(_LEARNT)
    for at, (what, by, close) in enumerate((("units", 0, 1), ("loss", 1, 1), ("gradient", 3, 10))):
        first, second = (sum(total[at] for total in side) for side in sides)
        size_of = sum(abs(total[by]) for total in totals)
        if not math.isfinite(size_of):
            return f"the loss of the first {few} samples is not finite"
        if abs(first - second) > close * (3e-2 if samples.has_16_bit else 1e-5) * size_of:
            raise LossError(_MESSAGE.format(what=what, few=few, one=first, other=second))
    return None


_MESSAGE = (
    "the {what} of {few} samples sums to {one:.6g}, and to {other:.6g} with another "
    "split: the loss compares samples (a contrastive loss, a statistic of the batch), or it is a "
    "mean over other units than those counted. If only the gradient differs, a statistic of the "
    "batch is in stop_gradient, or a custom gradient depends on the batch or is not linear. "
    "audit=False turns this test off"
)
_LEARNT = (
    "the units depend on the parameters: the gradient of the mean then needs the units of the "
    "whole batch, which a micro-batch does not have. If they are constants, pass "
    "jax.lax.stop_gradient(units); audit=False turns this test off"
)


class _Samples:
    """The first samples of a batch, and the loss of any of them."""

    def __init__(
        self,
        loss: _Loss,
        args: Sequence[Any],
        batched: Sequence[int],
        few: int,
        wanted: Sequence[int],
    ) -> None:
        self._loss, self._args, self._few = loss, list(args), few
        self._batched, self._wanted = batched, wanted
        self._draws = self.has_16_bit = False
        self._compiled: dict[int, Callable[..., Any]] = {}  # by the number of rows

    def totals(self) -> tuple[list[Total], list[Total]]:
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
        batch, wanted = (
            [self._args[number] for number in numbers] for numbers in (self._batched, self._wanted)
        )
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[jnp.asarray(rows)], batch)

        def totals(batch: Any, wanted: Any) -> tuple[Any, ...]:
            def pair(*wanted: Any) -> tuple[Any, Any]:
                call = with_values(self._args, self._wanted, wanted)
                total, units = self._loss(*with_values(call, self._batched, batch))
                return total, jnp.asarray(units, total.dtype)

            (total, units), pull = jax.vjp(pair, *wanted)
            seed = jnp.asarray(1.0 if len(rows) == self._few else 0.25, total.dtype)
            slopes, none = map(jax.tree.leaves, (pull((seed, 0 * seed)), pull((0 * seed, seed))))
            mixed = sum(
                jnp.real(slope).ravel() @ jnp.cos(jnp.arange(slope.size)) for slope in slopes
            )
            sizes = [
                jnp.sqrt(sum((abs(slope) ** 2).sum() for slope in of)) for of in (slopes, none)
            ]
            return units, total, mixed / seed, sizes[0] / seed, sizes[1] / seed

        if len(rows) not in self._compiled:
            program = str(jax.make_jaxpr(totals)(batch, wanted).jaxpr)
            self._draws = any(word in program for word in _RANDOM)
            self.has_16_bit = any(word in program for word in _16_BIT)
            self._compiled[len(rows)] = jax.jit(totals)
        return tuple(float(number) for number in self._compiled[len(rows)](batch, wanted))


def with_values(args: Sequence[Any], numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return the arguments with these values at the places of these numbers."""
    call = list(args)
    for number, value in zip(numbers, values, strict=True):
        call[number] = value
    return call
