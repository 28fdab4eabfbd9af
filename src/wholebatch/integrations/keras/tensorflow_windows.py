"""Windows on TensorFlow: the micro-step of `fit`, and `TapeAccumulator` for a loop of one's own.

A micro-step is two functions, one that adds and one that adds and closes. Which of them runs is
known in Python, so that neither has a condition in its graph, and the optimizer is only in the
second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
from keras import ops, tree
from keras.src.losses.loss import unscale_loss_for_distribution

from wholebatch.errors import UnsupportedError, WindowError
from wholebatch.integrations.keras.accumulate_optimizer import (
    GradientAccumulateOptimizer,
    NonFinite,
)
from wholebatch.integrations.keras.loss_units import (
    UnitGroup,
    look_with_variables,
    replicas,
    run_losses,
    samples_in,
    wide,
)


def micro_step(model: Any, data: Any, *, closes: bool) -> Any:
    """Run Keras's own `train_step`, except that the gradient goes into the window.

    Nothing of it runs without the data: in a graph, what does not depend on them (counting the
    update) would run even where the iterator has come to its end.
    """
    import tensorflow as tf

    # (One that XLA compiles is a function of the data, and may not create variables within.)
    given = [each for each in tree.flatten(data) if each is not None]
    with tf.control_dependencies([] if model.jit_compile else given):
        x, y, sample_weight = inputs = keras.utils.unpack_x_y_sample_weight(data)
        optimizer = model.optimizer
        with tf.GradientTape(persistent=True) as tape:
            y_pred, loss, groups = run_losses(model, inputs, training=True)
            whole_loss = unscale_loss_for_distribution(loss)
            model._loss_tracker.update_state(whole_loss, sample_weight=samples_in(x))
            optimizer.hold([group.units is None for group in groups])
            weights = model.trainable_weights
            if not optimizer.built:
                optimizer.build(weights)
            weighted = optimizer.weighted(groups)
        gradients = [tape.gradient(each, weights) for each in weighted]
        del tape
        optimizer.add(gradients, [group.units for group in groups], weighted)
        if closes:
            optimizer.close()
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def looked_at(model: Any, iterator: Any) -> Any:
    """Look at the iterator's next micro-batch; return an iterator that gives it again."""
    import tensorflow as tf

    if model.distribute_strategy.num_replicas_in_sync > 1:
        model.must_look = False  # Its data are in pieces on several devices.
        return iterator
    data = iterator.get_next() if isinstance(iterator, tf.data.Iterator) else next(iterator)
    model.must_look = not look_with_variables(model, data)
    return iter([data])


def train_function(model: Any) -> Callable[[Any], Any]:
    """Return what `fit` calls: a function of one micro-step, or of `steps_per_execution`."""
    import tensorflow as tf

    adds, closes = (
        model._make_function(partial(micro_step, model, closes=closing))
        for closing in (False, True)
    )

    def one_step(iterator: Any) -> Any:
        optimizer = model.optimizer
        place = optimizer.place + 1
        closing = place >= model.accum_steps
        given = looked_at(model, iterator) if model.must_look else iterator
        logs = (closes if closing else adds)(given)
        optimizer.moved_to(0 if closing else place)
        if closing and optimizer.nonfinite == "raise":
            optimizer.report_skipped()
        return logs

    def function(iterator: Any) -> Any:
        steps, logs = model.steps_per_execution, None
        model.steps_per_execution = 1  # of the functions above; the loop over steps is here
        try:
            for _ in range(steps):
                try:
                    logs = one_step(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    if logs is None:
                        raise
                    break
        finally:
            model.steps_per_execution = steps
        return logs

    return function


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
        (weighted,) = self.window.weighted([UnitGroup(mean, counted)])
        return weighted

    def add(self, tape: Any, weighted: Any) -> None:
        """Add the micro-batch to the window; the last one makes the update."""
        if self._units is None:
            raise WindowError("add() without weigh(): call it under the tape first")
        import tensorflow as tf

        gradients = tape.gradient(weighted, self._variables)
        units, self._units = self._units, None
        self.window.add([gradients], [units], [weighted])
        self.window.close_if_full()
        if tf.executing_eagerly():
            self.window.report_skipped()

    def flush(self) -> bool:
        """Close a half-filled window; return True if there was one."""
        closed = self.window.flush()
        self.window.report_skipped()
        return closed
