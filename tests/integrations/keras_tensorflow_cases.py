"""Run by test_keras.py on TensorFlow: what only it has, and the page's change."""

from __future__ import annotations

import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from compare.keras_problem import data, distance, flat, model_of, squared

from tests.integrations.blocks import EXAMPLES, run_diff
from tests.integrations.keras_cases import LIMIT, fit, float64
from wholebatch.integrations.keras import GradientAccumulateModel

__all__ = ["float64"]  # the fixture of all these tests

EXAMPLE = EXAMPLES / "keras_tape.py"
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
def two_replicas() -> tf.distribute.Strategy:
    """Return the one strategy of this process: two met in one collective op."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_two_replicas() -> None:
    """MirroredStrategy: other tokens on each replica; clipping sees the whole gradient.

    The gradient of an embedding comes as rows. A window that is not finite on one replica makes no
    update on either.
    """
    assert len(tf.config.list_logical_devices("CPU")) == 2
    generator = np.random.default_rng(3)
    x = generator.integers(0, 7, (28, 5))  # 0 is padding
    y = generator.normal(size=(28, 5, 2))
    spoiled = y.copy()
    spoiled[9] = np.nan  # on one replica, in the second of four windows
    kept = [*range(8), *range(16, 28)]

    def made(kind: Any = keras.Model, **options: Any) -> Any:
        keras.utils.set_random_seed(5)
        inputs = keras.Input((5,), dtype="int32")
        rows = keras.layers.Embedding(7, 4, mask_zero=True)(inputs)
        return kind(inputs=inputs, outputs=keras.layers.Dense(2)(rows), **options)

    with two_replicas().scope():
        model = made(GradientAccumulateModel, accum_steps=2, nonfinite="skip")
        model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.5), "mse")
    start = flat(model)
    model.fit(x, spoiled, batch_size=4, shuffle=False, verbose=0)
    assert (model.optimizer.place, model.optimizer.skipped) == (0, 1)
    whole = made()
    whole.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.5), "mse", run_eagerly=True)
    assert distance(flat(model) - start, fit(whole, (x[kept], y[kept]), (8, 8, 4), 1)) <= 1e-12


def test_the_example_of_a_loop_around_a_tape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven micro-batches and a short last window: the weights of undivided batches."""

    def weights(*arguments: str) -> Any:
        file = tmp_path / "weights.npy"
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments, "--save", str(file)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return np.load(file)

    start = weights("--epochs", "0")
    whole = weights("--micro-batch", "32", "--steps", "1") - start
    assert distance(weights("--micro-batch", "8", "--steps", "4") - start, whole) <= 1e-12


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
