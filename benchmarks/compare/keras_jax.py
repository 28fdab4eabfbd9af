"""Keras on JAX; two devices by keras.distribution.DataParallel."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import keras

from compare.keras_problem import Mode, rows_of, train_in
from compare.row import Row


def in_two(mode: Mode) -> Any:
    """The masked case under DataParallel: every micro-batch is shared by two devices."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    try:
        return train_in(nullcontext(), mode)
    finally:
        keras.distribution.set_distribution(before)


def rows() -> list[Row]:
    return rows_of("JAX", in_two=in_two)
