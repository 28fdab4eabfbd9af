"""The cases beside the split in Keras: statistics, bf16, a contrastive loss, NaN, resume."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from compare.keras_problem import (
    LENGTH,
    STEPS,
    WIDTH,
    Slices,
    contrastive,
    data,
    distance,
    flat,
    model_of,
    squared,
)
from compare.row import Row
from wholebatch.errors import NonFiniteError, UnsupportedError, WholebatchError
from wholebatch.integrations.keras import GradientAccumulateModel

__all__ = ["law_rows"]

SIZES, WHOLE = (3, 1, 1, 3, 1, 3, 3, 1), (8, 8)
MANY = 256
ROUNDED = "Keras rounds to float32 here"


def law_rows(library: str, *, loss_rounds: bool, moments_round: bool) -> list[Row]:
    """The rows of a backend; where Keras itself rounds to float32, no float64 is asked for."""
    loss = ("float32", ROUNDED) if loss_rounds else ("float64", "")
    moments = ("float32", ROUNDED) if moments_round else ("float64", "")
    return [
        _statistics(library, *moments),
        _in_16_bit(library),
        _contrastive(library, *loss),
        _nan(library, *loss),
        _resume(library, *loss),
    ]


def joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def trained(
    arrays: Any,
    sizes: Any,
    mode: str,
    loss: Any = squared,
    *,
    build: Callable[..., Any] | None = None,
    optimizer: Any = None,
    **options: Any,
) -> Any:
    """The model after one epoch of `fit`; "own" with all of a window in one batch is the truth."""
    steps = len(sizes) // 2 if len(sizes) < MANY else MANY
    build = build or (lambda cls, **o: model_of(cls, masked=False, **o))
    optimizer = optimizer or keras.optimizers.SGD(0.01)
    if mode == "ours":
        model = build(GradientAccumulateModel, accum_steps=steps, **options)
    else:
        model = build(keras.Model)
        if mode == "own":
            optimizer.gradient_accumulation_steps = steps
    model.compile(optimizer, loss)
    model.fit(Slices(arrays, sizes), epochs=1, shuffle=False, verbose=0)
    return model


def error(got: Any, want: Any, start: Any) -> float | str:
    found = distance(got - start, want - start)
    return found if found == found else "NaN"


def _statistics(library: str, precision: str, note: str) -> Row:
    """Running statistics of a layer on the inputs, after two windows."""
    x, y = data(sum(SIZES))

    def found(kind: Any, sizes: Any, mode: str) -> Any:
        norm = kind()

        def build(cls: Any, **options: Any) -> Any:
            inputs = keras.Input((LENGTH, WIDTH))
            return cls(inputs=inputs, outputs=keras.layers.Dense(7)(norm(inputs)), **options)

        trained((x, y), sizes, mode, build=build)
        return np.concatenate(
            [keras.ops.convert_to_numpy(each) for each in (norm.moving_mean, norm.moving_variance)]
        )

    plain = keras.layers.BatchNormalization
    whole = found(plain, WHOLE, "whole")
    own = distance(found(plain, SIZES, "own"), whole)
    ours: float | str
    try:
        ours = distance(found(plain, SIZES, "ours"), whole)
    except UnsupportedError:
        ours = "refused"
    return Row(library, "BatchNorm statistics", own, ours, precision, note)


class Keep(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Keeps the gradient that it is given, in float32, and updates nothing."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.kept = [
            self.add_variable(variable.shape, dtype="float32", name=f"kept_{index}")
            for index, variable in enumerate(variables)
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        kept = self.kept[self._get_variable_index(variable)]
        self.assign(kept, keras.ops.cast(gradient, "float32"))

    def gradient(self) -> Any:
        parts = [keras.ops.convert_to_numpy(each).ravel() for each in self.kept]
        return np.concatenate(parts).astype("float64")


def _in_16_bit(library: str) -> Row:
    """The gradient of 256 micro-batches in bf16, beside their sum in float64."""
    before = keras.config.floatx()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("bfloat16")
    try:
        x, y = (array.astype("float32") for array in data(2 * MANY))
        optimizer = Keep(0.0)
        model = model_of(masked=False)
        model.compile(optimizer, squared)
        truth = 0.0
        for at in range(0, 2 * MANY, 2):
            model.train_on_batch(x[at : at + 2], y[at : at + 2])
            truth = truth + optimizer.gradient() / MANY
        found = []
        for mode in ("own", "ours"):
            kept = Keep(0.0)
            trained((x, y), (2,) * MANY, mode, optimizer=kept)
            found.append(distance(kept.gradient(), truth))
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)
    note = "the gradient, beside its sum in float64"
    return Row(library, "bf16 × 256", found[0], found[1], "bf16", note)


def _contrastive(library: str, precision: str, note: str) -> Row:
    """A plain loss that compares all samples with each other."""
    arrays = data(sum(SIZES))
    start = flat(model_of(masked=False))
    whole = flat(trained(arrays, WHOLE, "whole", contrastive))
    own = error(flat(trained(arrays, SIZES, "own", contrastive)), whole, start)
    ours: float | str
    try:
        ours = error(flat(trained(arrays, SIZES, "ours", contrastive)), whole, start)
    except WholebatchError:
        ours = "refused"
    return Row(library, "contrastive", own, ours, precision, note)


def _nan(library: str, precision: str, note: str) -> Row:
    """A NaN in the second window: what was trained beside the first window alone."""
    x, y = data(sum(SIZES))
    spoiled = y.copy()
    spoiled[10] = np.nan
    start = flat(model_of(masked=False))
    whole = flat(trained((x[:8], y[:8]), (8,), "whole"))
    own = error(flat(trained((x, spoiled), SIZES, "own")), whole, start)
    ours = error(flat(trained((x, spoiled), SIZES, "ours", nonfinite="skip")), whole, start)
    try:
        trained((x, spoiled), SIZES, "ours")
        ours = "NaN"  # it must raise
    except NonFiniteError:
        pass
    what = 'nonfinite="skip"; raises by default'
    return Row(library, "NaN", own, ours, precision, joined(what, note))


def _resume(library: str, precision: str, note: str) -> Row:
    """Two windows of equal micro-batches, saved and loaded in the middle of the second."""
    x, y = data(16)
    start = flat(model_of(masked=False))
    whole = flat(trained((x, y), WHOLE, "whole"))

    def found(mode: str) -> Any:
        own = {"gradient_accumulation_steps": STEPS} if mode == "own" else {}
        cls, options = (
            (keras.Model, {}) if own else (GradientAccumulateModel, {"accum_steps": STEPS})
        )
        model = model_of(cls, masked=False, **options)
        model.compile(keras.optimizers.SGD(0.01, **own), SquaredLoss())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            for at in range(0, 16, 2):
                if at == 12:
                    model.save(path)
                    model = keras.models.load_model(path)
                model.train_on_batch(x[at : at + 2], y[at : at + 2])
        return flat(model)

    errors = [error(found(mode), whole, start) for mode in ("own", "ours")]
    what = "saved after 6 of 8 equal micro-batches, in the second window"
    own, ours = errors
    return Row(library, "resume", own, ours, precision, joined(what, note))


@keras.saving.register_keras_serializable(package="compare")
class SquaredLoss(keras.losses.Loss):  # type: ignore[misc]
    """`squared` as a class, which a saved model can name."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return squared(y_true, y_pred)
