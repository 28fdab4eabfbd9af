"""Keras's `fit` on undivided batches, by its own accumulation, and with wholebatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import keras
import numpy as np

from compare.row import Row
from wholebatch.integrations.keras import GradientAccumulateModel

__all__ = [
    "CASES",
    "STEPS",
    "Case",
    "Mode",
    "contrastive",
    "data",
    "flat",
    "model_of",
    "rows_of",
    "squared",
    "train_in",
]

Mode = Literal["whole", "own", "ours"]
LENGTH, WIDTH, CLASSES, STEPS = 6, 3, 7, 4


@dataclass(frozen=True)
class Case:
    """The sizes of an epoch's micro-batches, and what else the case has."""

    sizes: tuple[int, ...]
    masked: bool = False
    clip_norm: float | None = None

    @property
    def windows(self) -> tuple[int, ...]:
        """The sizes of the undivided batches."""
        return tuple(
            sum(self.sizes[start : start + STEPS]) for start in range(0, len(self.sizes), STEPS)
        )


CASES: dict[str, Case] = {
    "equal": Case((2,) * 8),
    "uneven": Case((3, 1, 1, 3, 1, 3, 3, 1)),
    "short tail": Case((2,) * 10),
    "masked tokens": Case((2,) * 8, masked=True),
    "clipped": Case((2,) * 8, masked=True, clip_norm=0.02),
}


class Slices(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of given sizes, in the order of the data."""

    def __init__(self, arrays: Sequence[Any], sizes: Sequence[int]) -> None:
        super().__init__()
        self.arrays = arrays
        self.ends = list(accumulate(sizes))
        self.sizes = list(sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        end = self.ends[index]
        return tuple(array[end - self.sizes[index] : end] for array in self.arrays)


def data(samples: int) -> tuple[Any, Any]:
    """Sequences of very different lengths, zero where they are masked, and what to predict."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, LENGTH + 1, size=(samples, 1))
    kept = np.arange(LENGTH) < lengths
    x = random.normal(size=(samples, LENGTH, WIDTH)) * kept[..., None]
    return x, random.normal(size=(samples, LENGTH, CLASSES))


def squared(y_true: Any, y_pred: Any) -> Any:
    """One value per token. Keras's own losses, and tanh, compute in float32 on torch."""
    return keras.ops.sum(keras.ops.square(y_true - y_pred), axis=-1)


def contrastive(y_true: Any, y_pred: Any) -> Any:
    """One value per sample: how well it is told from all others of the batch."""
    z = keras.ops.reshape(y_pred, (-1, LENGTH * CLASSES))
    scores = keras.ops.matmul(z, keras.ops.transpose(z))
    own = keras.ops.sum(keras.ops.square(z), axis=1)
    return keras.ops.logsumexp(scores, axis=1) - own


def model_of(cls: Any = keras.Model, *, masked: bool, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH, WIDTH))
    hidden = keras.layers.Masking()(inputs) if masked else inputs
    hidden = keras.layers.Dense(5, activation="relu")(hidden)
    return cls(inputs=inputs, outputs=keras.layers.Dense(CLASSES)(hidden), **options)


def flat(model: Any) -> Any:
    return np.concatenate(
        [keras.ops.convert_to_numpy(weight).ravel() for weight in model.trainable_weights]
    ).astype("float64")


def distance(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def quick_eagerly() -> bool:
    """Whether a few steps are quicker without a graph: the truth needs none."""
    return bool(keras.backend.backend() == "tensorflow")


def train(case: Case, mode: Mode) -> Any:
    """One epoch of `fit`; how far the weights moved. The three differ in these lines only."""
    own = {"gradient_accumulation_steps": STEPS} if mode == "own" else {}
    optimizer = keras.optimizers.SGD(0.01, global_clipnorm=case.clip_norm, **own)
    if mode == "ours":
        model = model_of(GradientAccumulateModel, masked=case.masked, accum_steps=STEPS)
    else:
        model = model_of(masked=case.masked)
    start = flat(model)
    model.compile(optimizer, squared, run_eagerly=mode == "whole" and quick_eagerly())
    sizes = case.windows if mode == "whole" else case.sizes
    model.fit(Slices(data(sum(case.sizes)), sizes), epochs=1, shuffle=False, verbose=0)
    return flat(model) - start


def train_in(placed: Any, mode: Mode) -> Any:
    """Return how far the weights of the masked case moved, with the model made in this context."""
    case, ours = CASES["masked tokens"], mode == "ours"
    own = {} if ours else {"gradient_accumulation_steps": STEPS}
    steps = {"accum_steps": STEPS} if ours else {}
    with placed:
        model = model_of(GradientAccumulateModel if ours else keras.Model, masked=True, **steps)
        model.compile(keras.optimizers.SGD(0.01, **own), squared)
    start = flat(model)
    x, y = data(sum(case.sizes))
    model.fit(x, y, batch_size=case.sizes[0], epochs=1, shuffle=False, verbose=0)
    return flat(model) - start


def rows_of(
    backend: str,
    *,
    precision: str = "float64",
    in_two: Callable[[Mode], Any] | None = None,
    own_in_two: bool = True,
) -> list[Row]:
    """Return the rows of one backend; `in_two` trains the masked case on two devices."""
    keras.config.set_floatx("float64")
    trainer = f"Keras, {backend}"
    rows = []
    for name, case in CASES.items():
        whole = train(case, "whole")
        own, ours = (distance(train(case, mode), whole) for mode in ("own", "ours"))
        rows.append(Row(trainer, keras.__version__, name, own, ours, precision))
    if in_two is not None:
        whole = train(CASES["masked tokens"], "whole")
        theirs = distance(in_two("own"), whole) if own_in_two else None
        ours = distance(in_two("ours"), whole)
        rows.append(Row(trainer, keras.__version__, "two processes", theirs, ours, precision))
    return rows
