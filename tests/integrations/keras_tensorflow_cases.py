"""Run by test_keras.py on TensorFlow: what only it has, and the page's change."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from compare.keras_problem import Slices, data, distance, flat, model_of, squared

from tests.integrations.blocks import run_diff
from tests.integrations.keras_cases import LIMIT, SIZES, WINDOWS, fit, float64
from wholebatch.errors import NonFiniteError, WindowError
from wholebatch.integrations.keras import GradientAccumulateModel, TapeAccumulator

__all__ = ["float64"]  # the fixture of all these tests

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "keras.md"
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # quick tracing
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


def test_the_change_of_the_page() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    before, after = run_diff(PAGE)
    start = before["start"]
    want = np.concatenate([w.ravel() for w in before["model"].get_weights()]) - start
    got = np.concatenate([w.ravel() for w in after["model"].get_weights()]) - start
    assert distance(got, want) <= 1e-6
    assert before["history"].history.keys() == after["history"].history.keys()


@cache
def mirrored() -> Any:
    """Two replicas; TensorFlow numbers the collectives of a second strategy like the first's."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_two_replicas() -> None:
    """MirroredStrategy: other tokens on each replica; clipping sees the whole gradient."""
    assert len(tf.config.list_logical_devices("CPU")) == 2
    x, y = data(22)
    with mirrored().scope():
        model = model_of(GradientAccumulateModel, masked=True, accum_steps=4)
        model.compile(keras.optimizers.SGD(0.01, global_clipnorm=1.0), squared)
    start = flat(model)
    model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    assert model.optimizer.place == 0
    whole = model_of(masked=True)
    whole.compile(keras.optimizers.SGD(0.01, global_clipnorm=1.0), squared, run_eagerly=True)
    assert distance(flat(model) - start, fit(whole, (x, y), (8, 8, 6))) <= 1e-12


def test_embeddings_on_two_replicas() -> None:
    """The gradient of an embedding comes as rows; other numbers of tokens on each replica."""
    generator = np.random.default_rng(3)
    x = generator.integers(0, 7, (20, 5))  # 0 is padding
    y = generator.normal(size=(20, 5, 2))

    def made(kind: Any = keras.Model, **options: Any) -> Any:
        keras.utils.set_random_seed(5)
        inputs = keras.Input((5,), dtype="int32")
        rows = keras.layers.Embedding(7, 4, mask_zero=True)(inputs)
        return kind(inputs=inputs, outputs=keras.layers.Dense(2)(rows), **options)

    with mirrored().scope():
        model = made(GradientAccumulateModel, accum_steps=2)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    start = flat(model)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    whole = made()
    whole.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    assert distance(flat(model) - start, fit(whole, (x, y), (8, 8, 4), epochs=1)) <= 1e-12


def test_a_loop_around_a_tape() -> None:
    """Eagerly in the first window, as a graph from then on."""
    x, y = data(sum(SIZES))
    whole = model_of(masked=False)
    whole.compile(keras.optimizers.SGD(0.01, global_clipnorm=0.5), squared, run_eagerly=True)
    want = fit(whole, (x, y), WINDOWS, epochs=1)

    model = model_of(masked=False)
    start = flat(model)
    accumulator = TapeAccumulator(
        keras.optimizers.SGD(0.01, global_clipnorm=0.5), model.trainable_variables, accum_steps=4
    )

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(squared(y, model(x, training=True)))
            weighted = accumulator.weigh(total, units=tf.shape(x)[0] * 6)
        accumulator.add(tape, weighted)

    graph = tf.function(step, reduce_retracing=True)
    for index in range(len(SIZES)):
        run = graph if index >= 4 else step
        run(*map(tf.convert_to_tensor, Slices((x, y), SIZES)[index]))
    assert accumulator.place == 2
    assert accumulator.flush()
    assert not accumulator.flush()
    assert distance(flat(model) - start, want) <= 1e-12
    with pytest.raises(WindowError, match="without weigh"):
        accumulator.add(None, None)


def test_several_steps_per_execution_and_validation() -> None:
    """Windows do not care how many steps an execution has; the tail is closed before validation.

    The third execution asks for an eighth micro-batch, which would close a window: that there is
    none must leave Adam's count of updates alone.
    """
    arrays = data(14)
    whole = model_of(masked=False)
    whole.compile(keras.optimizers.Adam(0.01), squared, run_eagerly=True)
    want = fit(whole, arrays, (8, 6))
    model = model_of(GradientAccumulateModel, masked=False, accum_steps=4)
    model.compile(keras.optimizers.Adam(0.01), squared, steps_per_execution=3)
    seen = []

    class Look(keras.callbacks.Callback):  # type: ignore[misc]
        def on_test_begin(self, logs: Any = None) -> None:
            seen.append(model.optimizer.place)

    moved = fit(model, arrays, (2,) * 7, validation_data=arrays, callbacks=[Look()])
    assert seen == [0, 0]
    assert int(model.optimizer.iterations) == 4
    assert distance(moved, want) <= LIMIT


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_tape_that_is_not_finite(in_graph: bool) -> None:
    x, y = data(4)
    model = model_of(masked=False)
    start = flat(model)
    accumulator = TapeAccumulator(
        keras.optimizers.SGD(0.01), model.trainable_variables, accum_steps=2
    )

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(squared(y, model(x, training=True)))
            weighted = accumulator.weigh(total, units=12)
        accumulator.add(tape, weighted)

    run = tf.function(step) if in_graph else step
    run(*map(tf.convert_to_tensor, (x[:2], y[:2] * np.nan)))
    with pytest.raises(NonFiniteError, match="Nothing was updated"):
        run(*map(tf.convert_to_tensor, (x[2:], y[2:])))
        assert in_graph
        accumulator.flush()
    assert accumulator.skipped == 1
    assert not np.any(flat(model) - start)


def test_two_replicas_skip_a_window_that_is_not_finite() -> None:
    x, y = data(24)
    spoiled = y.copy()
    spoiled[9, 0, 0] = np.nan  # on one replica, in the second of three windows
    kept = [*range(8), *range(16, 24)]
    with mirrored().scope():
        model = model_of(GradientAccumulateModel, masked=False, accum_steps=4, nonfinite="skip")
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), squared)
    start = flat(model)
    model.fit(x, spoiled, batch_size=2, shuffle=False, verbose=0)
    assert model.optimizer.skipped == 1
    whole = model_of(masked=False)
    whole.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), squared, run_eagerly=True)
    want = fit(whole, (x[kept], y[kept]), (8, 8), epochs=1)
    assert distance(flat(model) - start, want) <= 1e-12
