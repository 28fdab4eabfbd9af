"""Run by test_keras.py on each backend: Keras's own training on undivided batches is the truth."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # Keras would import it if it can

import keras
import numpy as np
import pytest
from compare.keras_problem import (
    CASES,
    Slices,
    contrastive,
    data,
    distance,
    flat,
    model_of,
    quick_eagerly,
    squared,
    train,
)
from keras import layers, ops

from tests.integrations.blocks import assert_example_shows_the_change
from wholebatch.errors import (
    LossError,
    NonFiniteError,
    OptionError,
    UnsupportedError,
)
from wholebatch.integrations.keras import (
    GradientAccumulateModel,
    GradientAccumulateOptimizer,
)

BACKEND = keras.backend.backend()
# The others spend their time compiling: they run the cases that pass through their own code.
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="runs on the torch backend")
# Keras itself rounds the mean loss to float32 on torch.
LIMIT = {"tensorflow": 1e-12, "torch": 1e-6}[BACKEND]
ROUNDED = {"tensorflow": 1e-12, "torch": 1e-6}[BACKEND]
# Keras's own conversion of its TensorFlow variables, with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SIZES = (3, 1, 1, 3, 1, 3, 3, 1, 3, 1)  # windows of four, and a tail of two
WINDOWS = (8, 8, 4)


@pytest.fixture(autouse=True)
def float64() -> Any:
    keras.config.set_floatx("float64")
    keras.utils.clear_session()
    yield
    keras.config.set_dtype_policy("float64")


def test_torch_is_not_needed() -> None:
    """This process has not imported it for the sake of the adapter."""
    assert BACKEND == "torch" or "torch" not in sys.modules


def fit(model: Any, arrays: Any, sizes: Any, epochs: int = 2, **options: Any) -> Any:
    start = flat(model)
    model.fit(Slices(arrays, sizes), epochs=epochs, shuffle=False, verbose=0, **options)
    return flat(model) - start


def both(build: Callable[..., Any], compile_: Callable[[Any], None], arrays: Any) -> float:
    """Two epochs on undivided batches, and in windows: how far apart the weights are."""
    sizes = SIZES if BACKEND == "torch" else (2,) * 10  # of one shape, to compile once
    moved = []
    for ours in (False, True):
        keras.utils.set_random_seed(0)
        model = build(GradientAccumulateModel, accum_steps=4) if ours else build(keras.Model)
        compile_(model)
        if not ours:
            model.run_eagerly = quick_eagerly()
        moved.append(fit(model, arrays, sizes if ours else WINDOWS))
    return distance(moved[1], moved[0])


def two_outputs() -> Any:
    """Two outputs; a mask on one of them makes their units differ."""
    inputs = keras.Input((6, 3))
    tokens = layers.Dense(7, name="tokens")(layers.Masking()(inputs))
    label = layers.Dense(2, name="label")(layers.GlobalMaxPooling1D()(inputs))
    return GradientAccumulateModel(inputs=inputs, outputs=[tokens, label], accum_steps=2)


class Pairs(Slices):
    """One target for each of two outputs."""

    def __getitem__(self, index: int) -> Any:
        x, y, labels = super().__getitem__(index)
        return x, (y, labels)


@on_torch
def test_outputs_with_units_of_their_own_are_refused() -> None:
    """A mean over tokens beside one over samples."""
    x, y = data(8)
    model = two_outputs()
    model.compile("sgd", [squared, "mse"])
    with pytest.raises(LossError, match="losses are over different units"):
        model.fit(Pairs((x, y, y[:, 0, :2]), (4, 4)), shuffle=False, verbose=0)


REDUCTIONS = ("mean_with_sample_weight", "sum_over_batch_size", "sum")


@pytest.mark.parametrize("reduction", REDUCTIONS if BACKEND == "torch" else REDUCTIONS[:1])
def test_sample_weights_masks_and_reductions(reduction: str) -> None:
    """With weight decay, momentum and a schedule of the learning rate: once per update."""
    x, y = data(sum(SIZES))
    weights = np.random.default_rng(1).uniform(size=(len(x), 6)) * 3

    class Squared(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return squared(y_true, y_pred)

    def build(cls: Any, **options: Any) -> Any:
        return model_of(cls, masked=True, **options)

    def compile_(model: Any) -> None:
        schedule = keras.optimizers.schedules.InverseTimeDecay(0.001, 1, 0.5)
        model.compile(
            keras.optimizers.SGD(
                schedule, momentum=0.9, weight_decay=0.1, clipnorm=3.0, use_ema=True
            ),
            Squared(reduction=reduction),
        )

    assert both(build, compile_, (x, y, weights)) <= ROUNDED


def test_a_window_is_kept_by_saving(tmp_path: Path) -> None:
    """Saved after 6 of 8 micro-batches, loaded, and gone on: the same weights."""
    x, y = data(16)
    parts = [(x[at : at + 2], y[at : at + 2]) for at in range(0, 16, 2)]

    def fresh() -> Any:
        model = model_of(GradientAccumulateModel, masked=True, accum_steps=4)
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=quick_eagerly())
        return model

    straight, stopped = fresh(), fresh()
    for part in parts:
        straight.train_on_batch(*part)
    for part in parts[:6]:
        stopped.train_on_batch(*part)
    assert stopped.optimizer.place == 2
    stopped.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, GradientAccumulateModel)
    assert (loaded.accum_steps, loaded.optimizer.place) == (4, 2)
    for part in parts[6:]:
        loaded.train_on_batch(*part)
    assert loaded.optimizer.place == 0
    assert int(ops.convert_to_numpy(loaded.optimizer.iterations)) == 2
    np.testing.assert_array_equal(flat(loaded), flat(straight))


def test_the_optimizer_alone() -> None:
    case = CASES["short tail"]
    whole = train(case, "whole")
    optimizer = GradientAccumulateOptimizer(keras.optimizers.SGD(0.01), 4, units="equal")
    model = model_of(masked=False)
    model.compile(optimizer, squared)
    moved = fit(model, data(sum(case.sizes)), case.sizes, epochs=1, callbacks=[optimizer.tail()])
    assert distance(moved, whole) <= LIMIT
    # As its users call it: it warns once, and equal micro-batches are exact.
    model = model_of(masked=False)
    alone = GradientAccumulateOptimizer(optimizer=keras.optimizers.SGD(0.01), accum_steps=4)
    model.compile(alone, squared)
    tail = [alone.tail()]
    with pytest.warns(UserWarning, match="does not see the sizes of micro-batches"):
        moved = fit(model, data(sum(case.sizes)), case.sizes, epochs=1, callbacks=tail)
    assert distance(moved, whole) <= LIMIT


def test_half_precision_skips_whole_windows() -> None:
    """An overflow in one micro-batch skips the window and halves the scale once; fp32 sums."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(16)
    scaler = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=2.0**12
    )
    model = model_of(GradientAccumulateModel, masked=False, accum_steps=4)
    model.compile(scaler, squared, run_eagerly=quick_eagerly())
    broken = x.copy()
    broken[5] = np.inf
    assert not np.any(fit(model, (broken, y), (2, 2, 2, 2), epochs=1))
    assert float(ops.convert_to_numpy(scaler.dynamic_scale)) == 2.0**11
    got = fit(model, (x, y), (2, 2, 2, 2), epochs=1)
    assert float(ops.convert_to_numpy(scaler.dynamic_scale)) == 2.0**11
    whole = model_of(masked=False)
    whole.compile(keras.optimizers.SGD(0.01), squared, run_eagerly=quick_eagerly())
    assert isinstance(whole.optimizer, keras.mixed_precision.LossScaleOptimizer)
    want = fit(whole, (x, y), (8,), epochs=1)
    keras.config.set_dtype_policy("float32")
    truth = model_of(masked=False)
    truth.compile(keras.optimizers.SGD(0.01), squared, run_eagerly=quick_eagerly())
    exact = fit(truth, (x, y), (8,), epochs=1)
    assert distance(got, exact) <= 1.25 * distance(want, exact)


@on_torch
def test_batchnorm_is_audited() -> None:
    def model(batchnorm: str) -> Any:
        inputs = keras.Input((4,))
        outputs = layers.BatchNormalization(name="the_norm")(inputs)
        return GradientAccumulateModel(
            inputs=inputs, outputs=outputs, accum_steps=2, batchnorm=batchnorm
        )

    with pytest.raises(UnsupportedError, match="the_norm"):
        model("refuse").compile("sgd", "mse")
    with pytest.warns(UserWarning, match="the_norm"):
        model("warn").compile("sgd", "mse")
    with pytest.raises(OptionError, match="batchnorm='no'"):
        model("no")


def scalar(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred))


def test_refusals() -> None:
    for steps in (0, 2.5, True):
        with pytest.raises(OptionError, match="accum_steps="):
            model_of(GradientAccumulateModel, masked=False, accum_steps=steps)
    with pytest.raises(OptionError, match="gradient_accumulation_steps=2"):
        GradientAccumulateOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2), 4)
    with pytest.raises(UnsupportedError, match="auto_scale_loss=False"):
        keras.mixed_precision.LossScaleOptimizer(GradientAccumulateOptimizer("sgd", 4))

    class Own(GradientAccumulateModel):  # type: ignore[misc]
        def train_step(self, *args: Any) -> Any:
            return {}

    with pytest.raises(UnsupportedError, match="overrides train_step"):
        model_of(Own, masked=False, accum_steps=4).compile("sgd", "mse")

    x, y = data(sum(SIZES))
    model = model_of(GradientAccumulateModel, masked=False, accum_steps=4)
    model.compile("sgd", scalar, run_eagerly=quick_eagerly())
    with pytest.raises(LossError, match=r"units=\), a function"):
        fit(model, (x, y), SIZES)


@pytest.mark.parametrize("value", [np.nan, np.inf] if BACKEND == "torch" else [np.nan])
def test_a_window_that_is_not_finite_changes_nothing(value: float) -> None:
    """With Adam and weight decay, which move weights even at a gradient of zero."""
    x, y = data(24)
    spoiled = y.copy()
    spoiled[9, 0, 0] = value  # in the second of three windows
    kept = [*range(8), *range(16, 24)]

    def fresh(cls: Any, **options: Any) -> Any:
        model = model_of(cls, masked=False, **options)
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), squared)
        model.run_eagerly = quick_eagerly() and cls is keras.Model
        return model

    want = fit(fresh(keras.Model), (x[kept], y[kept]), (8, 8), epochs=1)
    skips = fresh(GradientAccumulateModel, accum_steps=4, nonfinite="skip")
    assert distance(fit(skips, (x, spoiled), (3, 1, 1, 3) * 3, epochs=1), want) <= LIMIT
    assert skips.optimizer.skipped == 1
    assert int(ops.convert_to_numpy(skips.optimizer.iterations)) == 2

    if BACKEND == "tensorflow":
        return
    raises = fresh(GradientAccumulateModel, accum_steps=4)
    start = flat(raises)
    with pytest.raises(NonFiniteError, match=r"in 1 windows.*no update.*nonfinite='skip'"):
        fit(raises, (x, spoiled), (3, 1, 1, 3) * 3, epochs=1)
    assert distance(flat(raises) - start, want) <= LIMIT  # raised at the end of the epoch


class Contrastive(keras.losses.Loss):  # type: ignore[misc]
    """One value per sample, each compared with all samples of the batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return contrastive(y_true, y_pred)


def test_a_loss_that_compares_samples_is_refused() -> None:
    x, y = data(8)

    def fresh(**options: Any) -> Any:
        model = model_of(GradientAccumulateModel, masked=False, accum_steps=2, **options)
        model.compile(keras.optimizers.SGD(0.01), Contrastive(), run_eagerly=quick_eagerly())
        return model

    model = fresh()
    start = flat(model)
    with pytest.raises(LossError, match=r"compares samples.*audit=False"):
        fit(model, (x, y), (4, 4), epochs=1)
    np.testing.assert_array_equal(flat(model), start)  # nothing moved, and nothing is lost
    assert np.any(fit(fresh(audit=False), (x, y), (4, 4), epochs=1))
    counts = model_of(
        GradientAccumulateModel, masked=False, accum_steps=2, units=lambda x, y, weight: 5
    )
    counts.compile("sgd", scalar, run_eagerly=quick_eagerly())
    with pytest.raises(LossError, match="units of a micro-batch are 5"):
        fit(counts, (x, y), (4, 4), epochs=1)


@on_torch
def test_the_example() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    assert_example_shows_the_change("keras_windows")
