"""`TapeAccumulator`: exact windows in a custom loop with `tf.GradientTape`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from wholebatch.errors import UnsupportedError, WindowError
from wholebatch.integrations.keras.accumulate_optimizer import GradientAccumulateOptimizer
from wholebatch.integrations.keras.keras_window import NonFinite, replicas
from wholebatch.integrations.keras.loss_units import Group, wide

__all__ = ["TapeAccumulator"]


class TapeAccumulator:
    """An accumulator with one exact update of the whole batch per `accum_steps` micro-batches.

    ```python
    accumulator = TapeAccumulator(optimizer, model.trainable_variables, accum_steps=4)
    for x, y in micro_batches:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(losses(y, model(x, training=True)))
            weighted = accumulator.weigh(total, units=len(x))
        accumulator.add(tape, weighted)
    accumulator.flush()                                   # the tail
    ```

    Call `weigh` under the tape, with the sum over the micro-batch and its units (samples, tokens,
    weights). `weigh` and `add` may be in a `tf.function`. A window with a loss or gradient that is
    not finite makes no update; `nonfinite="raise"` raises in `add`, or, if that is in a
    `tf.function`, in `flush`; "skip" counts it in `skipped`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        accum_steps: int,
        nonfinite: NonFinite = "raise",
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise UnsupportedError(
                "TapeAccumulator needs the TensorFlow backend; on JAX use "
                "wholebatch.integrations.jax, on torch wholebatch.Accumulator"
            )
        if replicas() > 1:
            raise UnsupportedError(
                "TapeAccumulator on several replicas: use GradientAccumulateModel"
            )
        self.window = GradientAccumulateOptimizer(optimizer, accum_steps, nonfinite=nonfinite)
        self.window.build(list(variables))
        self._variables = list(variables)
        self._units: Any = None

    @property
    def place(self) -> int:
        """The number of micro-batches in the open window."""
        return self.window.place

    @property
    def skipped(self) -> int:
        """Windows that made no update because a loss or gradient was not finite."""
        return self.window.skipped

    def weigh(self, total: Any, *, units: Any) -> Any:
        """Return the loss for the tape to differentiate, from a sum over this many units."""
        counted = ops.cast(units, wide())
        self._units = counted
        mean = ops.divide_no_nan(ops.cast(total, wide()), counted)
        (weighted,) = self.window.weighted([Group(mean, counted)])
        return weighted

    def add(self, tape: Any, weighted: Any) -> None:
        """Add the micro-batch to the window; the last one makes the update."""
        if self._units is None:
            raise WindowError("add() without weigh(): call it under the tape first")
        import tensorflow as tf

        gradients = tape.gradient(weighted, self._variables)
        units, self._units = self._units, None
        window = self.window
        window.add([gradients], [units], [weighted])
        ops.cond(ops.greater_equal(window._place, window.accum_steps), window.close, lambda: None)
        if tf.executing_eagerly():
            window.report_skipped()

    def flush(self) -> bool:
        """Close a half-filled window; return True if there was one."""
        closed = self.window.flush()
        self.window.report_skipped()
        return closed
