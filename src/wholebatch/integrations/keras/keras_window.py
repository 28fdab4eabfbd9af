"""The window of a Keras optimizer: sums of gradients, units, and the one update made from them.

For every group of losses it holds the sum of gradients in float32 (or float64), the units, and how
many micro-batches are in. All of it are optimizer variables, saved with the model.

Every loss is multiplied by `units × seed` before its gradient is taken, so that the sum over the
window, divided by `Σ units × seed`, is the gradient of the whole batch's mean. The seed is near
1 / Σ units, so that float16 gradients stay as large as those of the whole batch.

A window with a loss or gradient that is not finite makes no update and is counted in `skipped`. A
compiled step cannot raise, so `report_skipped` raises afterwards, in Python. A LossScaleOptimizer
inside decides this itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
from keras import ops
from keras.src.utils import tracking

from wholebatch.errors import NonFiniteError, OptionError, UnsupportedError, WindowError
from wholebatch.integrations.keras.loss_units import Group, wide

__all__ = ["NonFinite", "Window", "check_nonfinite", "check_steps", "replicas"]

NonFinite = Literal["raise", "skip"]


def check_steps(accum_steps: Any) -> int:
    if not isinstance(accum_steps, int) or isinstance(accum_steps, bool) or accum_steps < 1:
        raise OptionError(
            f"accum_steps={accum_steps!r}: must be a positive number of micro-batches"
        )
    return accum_steps


def check_nonfinite(nonfinite: Any) -> NonFinite:
    if nonfinite not in ("raise", "skip"):
        raise OptionError(f'nonfinite={nonfinite!r}: must be "raise" or "skip"')
    return nonfinite  # type: ignore[no-any-return]


def replicas() -> int:
    """Over how many replicas of tf.distribute this step runs."""
    if keras.backend.backend() != "tensorflow":
        return 1
    import tensorflow as tf

    return int(tf.distribute.get_strategy().num_replicas_in_sync)


class Window(keras.optimizers.Optimizer):  # type: ignore[misc]
    """What GradientAccumulateOptimizer is made of: begin, add, close."""

    inner_optimizer: Any
    accum_steps: int
    driven: bool
    nonfinite: NonFinite
    _sums_only: tuple[bool, ...]
    _now: int | None

    @tracking.no_automatic_dependency_tracking  # type: ignore[untyped-decorator,unused-ignore]
    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        self.inner_optimizer.build(variables)
        super().build(variables)
        self._place = self._variable("place", (), "int32", "only_first_replica", "auto")
        self._skipped = self._variable("skipped", (), "int32", "only_first_replica", "auto")
        self._reported = 0
        self._window: list[tuple[Any, Any, list[Any]]] = []
        self._seen = [False] * len(variables)
        for _ in self._sums_only:
            self._add_group()

    def _add_group(self) -> None:
        index = len(self._window)
        units = self._variable(f"units_{index}", (), wide(), "sum", "on_read")
        seed = self._variable(f"seed_{index}", (), wide(), "only_first_replica", "auto")
        sums = [
            self._variable(
                f"sum_{index}_{number}",
                variable.shape,
                "float64" if str(variable.dtype) == "float64" else "float32",
                "sum",
                "on_read",
                like=variable,
            )
            for number, variable in enumerate(self._trainable_variables)
        ]
        self._window.append((units, seed, sums))

    def _variable(
        self, name: str, shape: Any, dtype: str, aggregation: str, sync: str, like: Any = None
    ) -> Any:
        variable = keras.Variable(
            initializer="zeros",
            shape=shape,
            dtype=dtype,
            trainable=False,
            autocast=False,
            aggregation=aggregation,
            synchronization=sync,
            layout=getattr(like, "_layout", None),
            name=name,
        )
        self._track_variable(variable)
        return variable

    @tracking.no_automatic_dependency_tracking  # type: ignore[untyped-decorator,unused-ignore]
    def hold(self, sums_only: Sequence[bool]) -> None:
        """Make room for these groups of losses (True: a sum, which has no units)."""
        wanted = tuple(sums_only)
        if wanted == self._sums_only:
            return
        if not self.built:
            self._sums_only = wanted
            return
        if len(wanted) < len(self._window):
            raise WindowError(
                f"the model's losses have {len(wanted)} kinds of units, and had "
                f"{len(self._window)} before: compile it again"
            )
        if replicas() > 1:
            raise UnsupportedError(
                "losses with different units (a mask on one of several outputs, a mean next to a "
                "sum) on several replicas: give them one unit with units=, or train on one"
            )
        while len(self._window) < len(wanted):
            self._add_group()
        self._sums_only = wanted

    def seed_of(self, group: int, units: Any) -> Any:
        """What the losses of this window are scaled by; near 1 / (units of the whole window)."""
        if self._sums_only[group]:
            return ops.ones((), wide())
        if not self.built:
            return 1.0 / (self.accum_steps * ops.maximum(units, 1.0))
        seed = ops.convert_to_tensor(self._window[group][1])
        if replicas() > 1:  # one number for all of them
            import tensorflow as tf

            units = tf.distribute.get_replica_context().all_reduce("SUM", units)
        return ops.where(seed > 0, seed, 1.0 / (self.accum_steps * ops.maximum(units, 1.0)))

    def weighted(self, groups: Sequence[Group]) -> list[Any]:
        """The numbers whose gradients are added up: losses × units × seed, scaled for float16."""
        found = []
        for index, group in enumerate(groups):
            factor = self.seed_of(index, group.units)
            if group.units is not None:
                factor = factor * group.units
            found.append(self.inner_optimizer.scale_loss(group.loss * factor))
        return found

    def add(
        self,
        gradients: Sequence[Sequence[Any]],
        units: Sequence[Any],
        losses: Sequence[Any] | None = None,
    ) -> None:
        """Take in one micro-batch: the gradients of its weighted losses, their units and values.

        A loss that is not finite makes the units NaN, even if its gradients are finite.
        """
        for index, (grads, counted) in enumerate(zip(gradients, units, strict=True)):
            total, seed, sums = self._window[index]
            seed.assign(self.seed_of(index, counted))
            more = counted
            if losses is not None and not self.scaled:
                value = ops.cast(losses[index], wide())
                known = ops.zeros((), wide()) if counted is None else counted
                more = ops.where(ops.isfinite(value), known, float("nan"))
            if more is not None:
                self.assign_add(total, more)
            here = [
                (sum_, grad) for sum_, grad in zip(sums, grads, strict=True) if grad is not None
            ]
            for number, grad in enumerate(grads):
                self._seen[number] = self._seen[number] or grad is not None
            self._add_all(here)
        self.assign_add(self._place, 1)

    def _add_all(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        backend = keras.backend.backend()
        if backend == "torch" and pairs:
            import torch

            sums = [sum_.value for sum_, _ in pairs]
            torch._foreach_add_(
                sums, [grad.to(sum_.dtype) for sum_, (_, grad) in zip(sums, pairs, strict=True)]
            )
            return
        many = replicas() > 1
        for sum_, grad in pairs:
            if backend == "tensorflow":  # sparse gradients of embeddings too
                self.assign_add(sum_, _dense(grad) if many else grad)
            else:
                sum_.assign(sum_ + ops.cast(grad, sum_.dtype))

    @property
    def scaled(self) -> bool:
        """True if a LossScaleOptimizer decides about gradients that are not finite."""
        return isinstance(self.inner_optimizer, keras.mixed_precision.LossScaleOptimizer)

    def mean_gradients(self) -> tuple[list[Any], Any]:
        """Return the whole batch's gradients and True (a tensor) if all of it is finite.

        The gradients still have the loss scale, and are reduced over replicas.
        """
        counted = [ops.convert_to_tensor(total) for total, _, _ in self._window]
        sums = [[ops.convert_to_tensor(each) for each in window[2]] for window in self._window]
        if replicas() > 1:
            import tensorflow as tf

            context = tf.distribute.get_replica_context()
            counted = context.all_reduce("SUM", counted)
            sums = [context.all_reduce("SUM", each) for each in sums]
        factors = []
        for index, (_, seed, _) in enumerate(self._window):
            scale = ops.convert_to_tensor(seed)
            if not self._sums_only[index]:
                scale = scale * counted[index]
            # Not divide_no_nan: on the torch backend it rounds numbers to float32.
            factors.append(ops.where(scale > 0, 1.0 / ops.where(scale > 0, scale, 1.0), 0.0))
        seen = self._seen if any(self._seen) else [True] * len(self._seen)
        gradients = _scaled(sums[0], factors[0])
        for each, factor in zip(sums[1:], factors[1:], strict=True):
            more = _scaled(each, factor)
            gradients = [ops.add(a, b) for a, b in zip(gradients, more, strict=True)]
        means = [grad if used else None for grad, used in zip(gradients, seen, strict=True)]
        checked = [*counted, *(grad for grad in means if grad is not None)]
        return means, ops.all(ops.stack([ops.all(ops.isfinite(each)) for each in checked]))

    def clear(self) -> None:
        """Empty the window; the seed stays."""
        self._place.assign(0)
        every = [variable for total, _, sums in self._window for variable in (total, *sums)]
        if keras.backend.backend() == "torch":
            import torch

            torch._foreach_zero_([variable.value for variable in every])
            self._seen = [False] * len(self._seen)  # elsewhere what was traced stays as it is
            return
        for variable in every:
            variable.assign(ops.zeros(variable.shape, variable.dtype))

    def close(self) -> None:
        """One update of the inner optimizer from what is in the window."""
        gradients, finite = self.mean_gradients()
        base = getattr(self.inner_optimizer, "inner_optimizer", self.inner_optimizer)
        if replicas() > 1:
            # They are sums over the replicas already, so that clipping sees the whole gradient.
            # (It stays: replicas are traced in turns, and this optimizer applies nothing else.)
            base._all_reduce_sum_gradients = list
        if self.scaled:
            self.inner_optimizer.apply(gradients, self._trainable_variables)
        else:
            self._apply_if(finite, gradients)
            self._skipped.assign(self._skipped + ops.cast(ops.logical_not(finite), "int32"))
        self.clear()

    def _apply_if(self, finite: Any, gradients: Sequence[Any]) -> None:
        """Make the inner optimizer's update, or change nothing."""

        def apply(gradients: Sequence[Any]) -> None:
            self.inner_optimizer.apply(gradients, self._trainable_variables)

        if replicas() == 1:
            ops.cond(finite, lambda: apply(gradients), lambda: None)
            return
        import tensorflow as tf

        def on_all(strategy: Any, finite: Any, gradients: Sequence[Any]) -> None:
            # A condition around an update must be outside of the replicas (as Keras's loss scale).
            ops.cond(
                strategy.experimental_local_results(finite)[0],
                lambda: strategy.extended.call_for_each_replica(apply, args=(gradients,)),
                lambda: None,
            )

        tf.distribute.get_replica_context().merge_call(on_all, args=(finite, gradients))

    @property
    def skipped(self) -> int:
        """Windows that made no update because a loss or gradient was not finite."""
        return int(ops.convert_to_numpy(self._skipped)) if self.built else 0

    def report_skipped(self, model: Any = None) -> None:
        """Raise if windows were skipped since the last call and `nonfinite` is "raise".

        On JAX the variables are empty during a fit: their values are in the `model`.
        """
        if self.nonfinite != "raise" or not self.built:
            return
        if getattr(self._skipped, "_value", self) is None:
            at = [id(variable) for variable in self.variables].index(id(self._skipped))
            found = int(model._jax_state["optimizer_variables"][at])
        else:
            found = self.skipped
        before, self._reported = self._reported, found
        if found > before:
            raise NonFiniteError(
                f"a loss or gradient of the last window ({self.accum_steps} micro-batches, or "
                "those left at the end of an epoch) is not finite. Nothing was updated: "
                "parameters and optimizer state are as before this window; pass "
                "nonfinite='skip' to skip and count such updates"
            )

    @property
    def place(self) -> int:
        """Micro-batches in the open window."""
        if not self.built:
            return 0
        if not self.driven:  # the window moves inside graphs, unseen from here
            return int(ops.convert_to_numpy(self._place))
        if self._now is None:
            self._now = int(ops.convert_to_numpy(self._place))
        return self._now

    def moved_to(self, place: int | None) -> None:
        """Note the place from outside: on JAX the variables are not current during a fit."""
        self._now = place


def _dense(gradient: Any) -> Any:
    """Return the gradient of an embedding as a whole table: replicas' variables take no rows."""
    import tensorflow as tf

    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _scaled(sums: Sequence[Any], factor: Any) -> list[Any]:
    """The sums times a number; in place on torch, where the window is emptied next."""
    if keras.backend.backend() != "torch":
        return [each * ops.cast(factor, each.dtype) for each in sums]
    import torch

    found = [each.detach() for each in sums]
    torch._foreach_mul_(found, factor.item())
    return found
