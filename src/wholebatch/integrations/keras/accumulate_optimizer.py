"""`GradientAccumulateOptimizer`: any Keras optimizer, once per window, on its exact gradient.

It holds the sum of gradients in float32 (or float64), the units, and how many micro-batches are in.
All of it are optimizer variables, saved with the model.

Keras's own train step asks the optimizer to scale the loss before its gradient is taken, and to
apply the gradient after it. The units of the loss are noted just before (`note`). `apply` adds
units × gradient, and closes the window if it is full: the sum over the window, divided by the sum
of the units, is the gradient of the whole batch's mean. The compiled step itself decides that.

A window with a loss or gradient that is not finite makes no update and is counted in `skipped`. A
compiled step cannot raise, so `flush` raises at the end of the epoch. A LossScaleOptimizer inside
decides this itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
from keras import ops
from keras.src.utils import tracking

from wholebatch.errors import NonFiniteError, OptionError, UnsupportedError, WindowError
from wholebatch.integrations.keras.loss_units import NO_UNITS, replicas, wide
from wholebatch.warn_user import warn_user

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


@keras.saving.register_keras_serializable(package="wholebatch")
class GradientAccumulateOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Apply `optimizer` once per `accum_steps` micro-batches, with their whole batch's gradient.

    Clipping, weight decay, moving averages, constraints and the learning rate's schedule belong to
    `optimizer` and so happen once per update.

    `GradientAccumulateModel` makes one by itself, and gives it the units of every loss. Alone, an
    optimizer does not see what a gradient is a mean over, and takes all micro-batches as equal.
    That is exact only if every one has the same number of units: no masks, no short last batch. It
    warns of this once; `units="equal"` says that you know.
    `callbacks=[optimizer.tail()]` closes a half-filled window at the end of an epoch; without it,
    it goes on in the next.

    A window with a gradient that is not finite makes no update, and is counted in `skipped`.
    `nonfinite="raise"` raises at the end of that epoch (by the callback of `tail()`).
    """

    def __init__(
        self,
        optimizer: Any,
        accum_steps: int,
        *,
        units: Literal["equal"] | None = None,
        nonfinite: NonFinite = "raise",
        name: str | None = None,
    ) -> None:
        inner = keras.optimizers.get(optimizer)
        if units not in (None, "equal"):
            raise OptionError(f'units={units!r}: must be "equal", or None in a model that counts')
        if isinstance(inner, GradientAccumulateOptimizer):
            raise OptionError("a GradientAccumulateOptimizer around another: one is enough")
        base = getattr(inner, "inner_optimizer", inner)
        if base.gradient_accumulation_steps:
            raise OptionError(
                f"the optimizer has gradient_accumulation_steps={base.gradient_accumulation_steps} "
                "already: leave that out, or windows would be accumulated twice"
            )
        super().__init__(learning_rate=0.0, name=name or "gradient_accumulate_optimizer")
        self.inner_optimizer = inner
        self.is_of_model = False  # True if a GradientAccumulateModel notes the units
        self.accum_steps = check_steps(accum_steps)
        self.units = units
        self.nonfinite = check_nonfinite(nonfinite)
        self._noted: Any = None  # the units of the loss that was computed last
        self._counted: Any = None  # those of the loss that was scaled last, and it
        self._now: int | None = None  # the place, on torch, where reading it waits for the device
        self._flush: Any = None
        self._inside = True
        self._warned = False

    @property
    def loss_scale_factor(self) -> bool:
        return False  # not None: TensorFlow's tracking drops an assignment of what is there

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        if getattr(self, "_inside", False):
            raise UnsupportedError(
                "a LossScaleOptimizer around GradientAccumulateOptimizer would skip single "
                "micro-batches of a window: put it inside, and keep Keras from adding one: "
                "compile(GradientAccumulateOptimizer(LossScaleOptimizer(optimizer), accum_steps), "
                "auto_scale_loss=False); or use GradientAccumulateModel"
            )

    # ---------------------------------------------------- the window: begin, add, close

    @tracking.no_automatic_dependency_tracking  # type: ignore[untyped-decorator,unused-ignore]
    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        self.inner_optimizer.build(variables)
        super().build(variables)
        self._place = self._variable("place", (), "int32", "only_first_replica", "auto")
        self._skipped = self._variable("skipped", (), "int32", "only_first_replica", "auto")
        self._reported = 0
        self._units = self._variable("units", (), wide(), "sum", "on_read")
        self._seen = [False] * len(variables)
        self._sums = [
            self._variable(
                f"sum_{number}",
                variable.shape,
                "float64" if str(variable.dtype) == "float64" else "float32",
                "sum",
                "on_read",
                like=variable,
            )
            for number, variable in enumerate(variables)
        ]

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

    def _over_replicas(self, value: Any) -> Any:
        """Return the sum over replicas of one number, or of several tensors."""
        if replicas() == 1:
            return value
        import tensorflow as tf

        return tf.distribute.get_replica_context().all_reduce("SUM", value)

    def add(self, gradients: Sequence[Any], units: Any, loss: Any) -> None:
        """Take in one micro-batch: the gradients of its loss, its units, and the loss.

        A loss that is not finite makes the units NaN, even if its gradients are finite.
        """
        finite = ops.ones((), wide())
        if not self.scaled:
            finite = ops.where(ops.isfinite(ops.cast(loss, wide())), finite, float("nan"))
        if units is NO_UNITS:  # Sums of micro-batches add up: the sum is divided by 1.
            divisor = ops.maximum(ops.convert_to_tensor(self._units), 1.0 / replicas())
            self._units.assign(divisor * finite)
        else:
            self.assign_add(self._units, units * finite)
        for number, gradient in enumerate(gradients):
            self._seen[number] = self._seen[number] or gradient is not None
        # Keras divides means by the number of replicas.
        factor = ops.ones((), wide()) if units is NO_UNITS else units * replicas()
        for sum_, gradient in zip(self._sums, gradients, strict=True):
            if gradient is None:
                continue
            weight = ops.cast(factor, sum_.dtype)
            if keras.backend.backend() == "tensorflow":
                self.assign_add(sum_, _times(gradient, weight))
            else:
                sum_.assign(sum_ + ops.cast(gradient, sum_.dtype) * weight)
        self._now = self.place + 1 if keras.backend.backend() == "torch" else None
        self.assign_add(self._place, 1)

    @property
    def scaled(self) -> bool:
        """True if a LossScaleOptimizer decides about gradients that are not finite."""
        return isinstance(self.inner_optimizer, keras.mixed_precision.LossScaleOptimizer)

    def mean_gradients(self) -> tuple[list[Any], Any]:
        """Return the whole batch's gradients and True (a tensor) if all of it is finite.

        The gradients still have the loss scale, and are reduced over replicas.
        """
        counted = self._over_replicas(ops.convert_to_tensor(self._units))
        sums = self._over_replicas([ops.convert_to_tensor(each) for each in self._sums])
        # Not divide_no_nan: on the torch backend it rounds numbers to float32.
        factor = ops.where(counted > 0, 1.0 / ops.where(counted > 0, counted, 1.0), 0.0)
        have_gradients = self._seen if any(self._seen) else [True] * len(self._seen)
        means = [
            each * ops.cast(factor, each.dtype) if used else None
            for each, used in zip(sums, have_gradients, strict=True)
        ]
        checked = [counted, *(gradient for gradient in means if gradient is not None)]
        return means, ops.all(ops.stack([ops.all(ops.isfinite(each)) for each in checked]))

    def clear(self) -> None:
        """Empty the window."""
        self._place.assign(0)
        for variable in (self._units, *self._sums):
            variable.assign(ops.zeros(variable.shape, variable.dtype))
        if keras.backend.backend() == "torch":  # elsewhere what was traced stays as it is
            self._seen, self._now = [False] * len(self._seen), 0

    def close(self) -> None:
        """Make one update of the inner optimizer from what is in the window."""
        gradients, finite = self.mean_gradients()
        base = getattr(self.inner_optimizer, "inner_optimizer", self.inner_optimizer)
        if replicas() > 1:
            # They are sums over the replicas already, so that clipping sees the whole gradient.
            # (It stays: replicas are traced in turns, and this optimizer applies nothing else.)
            base._all_reduce_sum_gradients = list
        if self.scaled:
            self._apply_inner(gradients)
        else:
            self._on_replicas_if(finite, self._apply_inner, gradients)
            self.count_skipped(finite)
        self.clear()

    def _apply_inner(self, gradients: Sequence[Any]) -> None:
        self.inner_optimizer.apply(gradients, self._trainable_variables)

    def count_skipped(self, finite: Any) -> None:
        """Count a window that makes no update because it is not finite."""
        self._skipped.assign(self._skipped + ops.cast(ops.logical_not(finite), "int32"))

    def is_full(self) -> Any:
        """Return True (a tensor) if the window has all its micro-batches."""
        return ops.greater_equal(ops.convert_to_tensor(self._place), self.accum_steps)

    def _on_replicas_if(self, condition: Any, run: Callable[..., None], *arguments: Any) -> None:
        """Call `run(*given)` on every replica if the condition holds, inside of a graph."""
        if replicas() == 1:
            ops.cond(condition, lambda: run(*arguments), lambda: None)
            return
        import tensorflow as tf

        def on_all(strategy: Any, condition: Any, *arguments: Any) -> None:
            # A condition around an update must be outside of the replicas (as Keras's loss scale).
            ops.cond(
                strategy.experimental_local_results(condition)[0],
                lambda: strategy.extended.call_for_each_replica(run, args=arguments),
                lambda: None,
            )

        tf.distribute.get_replica_context().merge_call(on_all, args=(condition, *arguments))

    @property
    def skipped(self) -> int:
        """Windows that made no update because a loss or gradient was not finite."""
        return int(ops.convert_to_numpy(self._skipped)) if self.built else 0

    def report_skipped(self) -> None:
        """Raise if windows were skipped since the last call and `nonfinite` is "raise"."""
        if self.nonfinite != "raise" or not self.built:
            return
        before, self._reported = self._reported, self.skipped
        if self._reported > before:
            raise NonFiniteError(
                f"a loss or gradient was not finite in {self._reported - before} windows (of "
                f"{self.accum_steps} micro-batches, or those left at the end of an epoch). They "
                "made no update: parameters and optimizer state were left as before them; pass "
                "nonfinite='skip' to skip and count such updates"
            )

    @property
    def place(self) -> int:
        """Micro-batches in the open window."""
        if not self.built:
            return 0
        return int(ops.convert_to_numpy(self._place)) if self._now is None else self._now

    # ------------------------------------------------- as an optimizer by itself

    def tail(self) -> Any:
        """Return a callback that closes a half-filled window at the end of every epoch."""
        return Tail()

    def note(self, units: Any) -> None:
        """Note the units of the micro-batch whose gradients come next."""
        self._noted = units

    def scale_loss(self, loss: Any) -> Any:
        if self._noted is None and self.is_of_model:
            raise WindowError("the units of this micro-batch are not known: train by fit()")
        if self._noted is None and self.units is None and not self._warned:
            self._warned = True
            warn_user(
                "GradientAccumulateOptimizer alone does not see the sizes of micro-batches, and "
                "takes them as equal: a short last batch or masked samples make another update. "
                'Use GradientAccumulateModel, or say units="equal" if all have the same size'
            )
        if self._noted is None:
            self._noted = ops.ones((), wide())
        self._counted, self._noted = (self._noted, loss), None
        return self.inner_optimizer.scale_loss(loss)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if not self.built:
            self.build(list(trainable_variables or ()))
        if self._counted is None:
            raise WindowError(
                "gradients of a loss that did not pass through optimizer.scale_loss(): write your "
                "own loop as examples/integrations/keras_tape.py"
            )
        (units, loss), self._counted = self._counted, None
        self.add(grads, units, loss)
        self.close_if_full()

    def close_if_full(self) -> None:
        """Close the window if it has all its micro-batches."""
        if keras.backend.backend() == "torch":
            if self.place >= self.accum_steps:
                self.close()
            return
        self._on_replicas_if(self.is_full(), self.close)

    def flush(self) -> bool:
        """Close a half-filled window; return True if there was one.

        Raise if a window was skipped since the last call and must not be (`nonfinite="raise"`).
        """
        if self.place == 0:
            self.report_skipped()
            return False
        if keras.backend.backend() == "torch":
            import torch

            with torch.no_grad():
                self.close()
        else:
            import tensorflow as tf

            run = self._distribution_strategy.run
            self._flush = self._flush or tf.function(lambda: run(self.close), autograph=False)
            self._flush()
        self.report_skipped()
        return True

    # -------------------------------------------------- what the inner one has

    @property
    def variables(self) -> list[Any]:
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """Updates made so far."""
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list: Any) -> None:
        self.inner_optimizer.finalize_variable_values(var_list)

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(store)
        self._now = None
        self._reported = self.skipped

    def get_config(self) -> dict[str, Any]:
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "accum_steps": self.accum_steps,
            "units": self.units,
            "nonfinite": self.nonfinite,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        inner = keras.saving.deserialize_keras_object(
            config["optimizer"], custom_objects=custom_objects
        )
        return cls(**{**config, "optimizer": inner})


def _times(gradient: Any, factor: Any) -> Any:
    """Return a gradient of TensorFlow's times a number.

    That of an embedding has rows; variables of several replicas take no rows.
    """
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, factor.dtype) * factor
    if replicas() > 1:
        return tf.cast(tf.convert_to_tensor(gradient), factor.dtype) * factor
    values = tf.cast(gradient.values, factor.dtype) * factor
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


class Tail(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that closes a half-filled window at the end of an epoch, before validation."""

    def _flush(self) -> None:
        (getattr(self.model, "flush", None) or self.model.optimizer.flush)()

    def on_test_begin(self, logs: Any = None) -> None:
        self._flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._flush()
