"""Keras on JAX; two devices by keras.distribution.DataParallel."""

from __future__ import annotations

import os
from typing import Any

os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import keras

from compare.keras_problem import CASES, STEPS, Mode, data, flat, model_of, rows_of, squared
from compare.row import Row
from wholebatch.integrations.keras import GradientAccumulateModel


def in_two(mode: Mode) -> Any:
    """The masked case under DataParallel: every micro-batch is shared by two devices."""
    case = CASES["masked tokens"]
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
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
    finally:
        keras.distribution.set_distribution(before)


def rows() -> list[Row]:
    return rows_of("JAX", in_two=in_two)
