"""The micro-step of `fit` on TensorFlow.

A micro-step is two functions, one that adds and one that adds and closes. Which of them runs is
known in Python, so that neither has a condition in its graph, and the optimizer is only in the
second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
from keras import tree
from keras.src.losses.loss import unscale_loss_for_distribution

from wholebatch.integrations.keras.loss_units import (
    look_with_variables,
    run_losses,
    samples_in,
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
