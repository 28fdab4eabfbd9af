"""Keras on TensorFlow; two devices by tf.distribute.MirroredStrategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from compare.keras_problem import CASES, STEPS, Mode, data, flat, model_of, rows_of, squared
from compare.row import Row


def in_two(mode: Mode) -> Any:
    """The masked case under MirroredStrategy: every micro-batch is shared by two devices."""
    import keras

    from wholebatch.integrations.keras import GradientAccumulateModel

    case = CASES["masked tokens"]
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        ours = mode == "ours"
        model = model_of(
            GradientAccumulateModel if ours else keras.Model,
            masked=True,
            **({"accum_steps": STEPS} if ours else {}),
        )
        own = {} if ours else {"gradient_accumulation_steps": STEPS}
        model.compile(keras.optimizers.SGD(0.01, **own), squared)
    start = flat(model)
    x, y = data(sum(case.sizes))
    model.fit(x, y, batch_size=case.sizes[0], epochs=1, shuffle=False, verbose=0)
    return flat(model) - start


def rows() -> list[Row]:
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    return rows_of(
        "TensorFlow",
        in_two=in_two,
        own_in_two=False,  # RuntimeError: merge_call called while defining a new graph
        note_in_two="two devices; its own accumulation does not run under MirroredStrategy",
    )
