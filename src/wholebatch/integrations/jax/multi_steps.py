"""`multi_steps`: optax.MultiSteps with exact weighting, for micro-batches that come one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from wholebatch.errors import OptionError, WindowError
from wholebatch.integrations.jax.accumulate import sum_dtype
from wholebatch.optional_packages import require

if TYPE_CHECKING:
    import optax


class WindowState(NamedTuple):
    """An open window, and the state of the transformation that its gradient goes to.

    It is a pytree like any other state: saved and restored in the middle of a window, the window
    goes on.
    """

    place: Any
    """Micro-batches in the open window."""
    units: Any
    """Their units."""
    total: Any
    """The sum of their gradients, in float32 or wider."""
    updates: Any
    """Updates made so far."""
    inner: Any
    skipped: Any
    """Windows that made no update because their gradient was not finite."""
    updated: Any
    """True if the last micro-batch closed its window with an update."""


def multi_steps(
    inner: optax.GradientTransformation,
    every_k: int | Callable[[Any], Any],
    *,
    of: Literal["mean", "sum"] = "mean",
) -> optax.GradientTransformationExtraArgs:
    """Apply `inner` once per `every_k` micro-batches, to the gradient of their whole batch.

    >>> import jax.numpy as jnp, optax
    >>> from wholebatch.integrations.jax import multi_steps
    >>> tx = multi_steps(optax.sgd(1.0), every_k=2)
    >>> w = jnp.array(0.0)
    >>> state = tx.init(w)
    >>> for gradient, units in ((1.0, 3), (5.0, 1)):      # means over 3 samples and over 1
    ...     updates, state = tx.update(jnp.array(gradient), state, w, units=units)
    ...     w = optax.apply_updates(w, updates)
    >>> float(w)
    -2.0

    `update(gradient, state, params, units=...)`: what the micro-batch's gradient is a mean over
    (or a sum: `of="sum"`), as a number or an array. `last=True` closes the window with this
    micro-batch, however few it has; `flush` closes it without another. Between windows the updates
    are zero and `inner` is not touched. `every_k` may be a function of the updates made so far.
    A window without any units makes no update, nor does one whose gradient is not finite: compiled
    code cannot raise, so `state.skipped` counts them. Other keywords go to `inner`.
    """
    require("optax", at_least="0.2.5", extra="jax", purpose="multi_steps")
    import optax

    if not callable(every_k) and (
        not isinstance(every_k, int) or isinstance(every_k, bool) or every_k < 1
    ):
        raise OptionError(
            f"every_k={every_k!r}: must be a positive number of micro-batches, or a function of "
            "the updates made so far"
        )
    if of not in ("mean", "sum"):
        raise OptionError(f'of={of!r}: must be "mean" or "sum"')
    windows = _Windows(optax.with_extra_args_support(inner), every_k, of == "mean")
    return optax.GradientTransformationExtraArgs(windows.init, windows.update)


@dataclass(frozen=True)
class _Windows:
    """The two functions of a `multi_steps`."""

    inner: optax.GradientTransformationExtraArgs
    every_k: int | Callable[[Any], Any]
    of_means: bool

    def init(self, params: Any) -> WindowState:
        """Return the state before the first micro-batch."""
        total = jax.tree.map(
            lambda leaf: jnp.zeros_like(leaf, dtype=sum_dtype(jnp.result_type(leaf))), params
        )
        widest = sum_dtype(jnp.result_type(*(jax.tree.leaves(total) or [jnp.float32])))
        # Three zeros, not one thrice: a buffer can be donated only once.
        place, updates, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
        units = jnp.zeros((), widest)
        inner, updated = self.inner.init(params), jnp.zeros((), bool)
        return WindowState(place, units, total, updates, inner, skipped, updated)

    def update(
        self,
        updates: Any,
        state: WindowState,
        params: Any = None,
        *,
        units: Any = None,
        last: Any = False,
        **extra: Any,
    ) -> tuple[Any, WindowState]:
        """Add the gradient of a micro-batch; return the inner update if the window closes."""
        if units is None:
            raise WindowError(
                "update() without units=: pass the number of samples or tokens that this "
                "micro-batch's gradient is a mean over"
            )
        counted = jnp.asarray(units).astype(state.units.dtype)
        if counted.shape:
            raise WindowError(f"units= has shape {counted.shape}: it must be a single number")
        total = self._added(state.total, updates, counted)
        place, window = state.place + 1, state.units + counted
        steps = self.every_k(state.updates) if callable(self.every_k) else self.every_k
        closes = (place >= steps) | jnp.asarray(last, bool)
        finite = jnp.ones((), bool)
        for leaf in jax.tree.leaves(total):
            finite &= jnp.isfinite(leaf).all()
        makes = closes & (window > 0) & finite

        def close(inner_state: Any) -> tuple[Any, Any]:
            mean = jax.tree.map(
                lambda sum_, leaf: (sum_ / window.astype(sum_.dtype)).astype(leaf.dtype),
                total,
                updates,
            )
            changes, new = self.inner.update(mean, inner_state, params, **extra)
            return changes, jax.tree.map(_no_narrower, new, inner_state)

        def keep(inner_state: Any) -> tuple[Any, Any]:
            shapes, new = jax.eval_shape(close, inner_state)
            none = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
            return none, jax.tree.map(_no_narrower, inner_state, new)

        changes, inner_state = jax.lax.cond(makes, close, keep, state.inner)
        open_ = jnp.logical_not(closes)
        return changes, WindowState(
            place=place * open_,
            units=window * open_,
            total=jax.tree.map(lambda sum_: jnp.where(open_, sum_, jnp.zeros_like(sum_)), total),
            updates=state.updates + makes,
            inner=inner_state,
            skipped=state.skipped + (closes & ~finite),
            updated=makes,
        )

    def _added(self, total: Any, updates: Any, units: Any) -> Any:
        """Return the sums with a micro-batch's gradient added, as a sum over its units."""

        def added(sum_: Any, leaf: Any) -> Any:
            more = leaf.astype(sum_.dtype)
            if not self.of_means:
                return sum_ + more
            # The gradient of a mean over no units is 0/0: it adds nothing.
            return sum_ + jnp.where(units == 0, 0, more * units.astype(sum_.dtype))

        return jax.tree.map(added, total, updates)


def flush(
    tx: optax.GradientTransformationExtraArgs, state: WindowState, params: Any, **extra: Any
) -> tuple[Any, WindowState]:
    """Close a window that is still open (the tail of an epoch); zero updates if none is.

    >>> import jax.numpy as jnp, optax
    >>> from wholebatch.integrations.jax import flush, multi_steps
    >>> tx = multi_steps(optax.sgd(1.0), every_k=4)
    >>> w = jnp.array(0.0)
    >>> _, state = tx.update(jnp.array(2.0), tx.init(w), w, units=8)
    >>> updates, state = flush(tx, state, w)
    >>> float(updates), int(state.updates)
    (-2.0, 1)

    Its updates are in float32 or wider: which dtype the window's gradients had is not known here.
    """
    nothing = jax.tree.map(jnp.zeros_like, state.total)
    updates, closed = tx.update(nothing, state, params, units=0, last=True, **extra)
    same_types = jax.tree.map(
        lambda new, old: new.astype(jnp.result_type(old)), closed.inner, state.inner
    )
    return updates, closed._replace(inner=same_types)


def has_updated(state: WindowState) -> Any:
    """Return True (an array) if the last `update` closed a window and made its update.

    A window that was skipped made none.
    """
    return state.updated


def _no_narrower(leaf: Any, other: Any) -> Any:
    """Return a leaf in the wider dtype of two.

    Adam's moments begin in the dtype of the parameters, and wider gradients widen them. Both ways
    out of a window must give the same dtypes.
    """
    return jnp.asarray(leaf).astype(jnp.promote_types(jnp.result_type(leaf), other.dtype))
