"""The micro-step on TensorFlow: two functions, one that adds and one that adds and closes.

Which of them runs is known in Python, so that neither has a condition in its graph, and the
optimizer is only in the second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
from keras import tree
from keras.src.losses.loss import unscale_loss_for_distribution

from wholebatch.integrations.keras.keras_look import look_with_variables
from wholebatch.integrations.keras.keras_window import replicas
from wholebatch.integrations.keras.loss_units import groups_of, wide

__all__ = ["symbolic_build", "train_function"]


def micro_step(model: Any, data: Any, *, closes: bool) -> Any:
    """Keras's own `train_step`, except that the gradient goes into the window.

    Nothing of it runs without the data: in a graph, what does not depend on them (counting the
    update) would run even where the iterator has come to its end.
    """
    import tensorflow as tf

    # (One that XLA compiles is a function of the data, and may not create variables within.)
    given = [each for each in tree.flatten(data) if each is not None]
    with tf.control_dependencies([] if model.jit_compile else given):
        return _micro_step(model, data, closes=closes)


def _micro_step(model: Any, data: Any, *, closes: bool) -> Any:
    import tensorflow as tf

    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    optimizer = model.optimizer
    with tf.GradientTape(persistent=True) as tape:
        y_pred, loss, samples, groups = _losses(model, x, y, sample_weight, training=True)
        model._loss_tracker.update_state(unscale_loss_for_distribution(loss), sample_weight=samples)
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


def _losses(model: Any, x: Any, y: Any, sample_weight: Any, *, training: bool) -> Any:
    """Return the predictions, the loss, the number of samples and the losses by units."""
    import tensorflow as tf

    first = next(each for each in tree.flatten(x) if each is not None)
    samples = tf.shape(first)[0]
    y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
    loss = model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )
    counted = None if model.count_units is None else model.count_units(x, y, sample_weight)
    groups = groups_of(
        model, loss, samples=tf.cast(samples, wide()), units=counted, replicas=replicas()
    )
    return y_pred, loss, samples, groups


def looked_at(model: Any, iterator: Any) -> Any:
    """Look at the iterator's next micro-batch; return an iterator that gives it again."""
    import tensorflow as tf

    if model.distribute_strategy.num_replicas_in_sync > 1:
        model.must_look = False  # Its data are in pieces on several devices.
        return iterator
    data = iterator.get_next() if isinstance(iterator, tf.data.Iterator) else next(iterator)
    model.must_look = not look_with_variables(
        model, data, lambda x, y, weight: _losses(model, x, y, weight, training=False)[-1]
    )
    return iter([data])


def train_function(model: Any) -> Callable[[Any], Any]:
    """What `fit` calls for every execution: one micro-step, or `steps_per_execution` of them."""
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


def symbolic_build(model: Any, build: Callable[..., None], iterator: Any, data_batch: Any) -> None:
    build(iterator=iterator, data_batch=data_batch)
