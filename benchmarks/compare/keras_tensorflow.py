"""Keras on TensorFlow; two devices by tf.distribute.MirroredStrategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from compare.keras_problem import Mode, rows_of, train_in
from compare.row import Row


def in_two(mode: Mode) -> Any:
    """The masked case under MirroredStrategy: every micro-batch is shared by two devices."""
    return train_in(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope(), mode)


def rows() -> list[Row]:
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    return rows_of(
        "TensorFlow",
        in_two=in_two,
        own_in_two=False,  # RuntimeError: merge_call called while defining a new graph
    )
