"""A Keras model over padded sequences: windows of four micro-batches, exactly one batch each.

Run: python examples/integrations/keras_windows.py          (KERAS_BACKEND chooses the backend)
It trains with batches of 32, with windows of 4 × 8 by Keras's own accumulation, and with windows
of 4 × 8 in a GradientAccumulateModel, and prints how far both are from the first.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from wholebatch.integrations.keras import GradientAccumulateModel

SAMPLES, LENGTH, WORDS, STEPS = 90, 12, 50, 4


def trained(cls: Any, batch_size: int, *, own_steps: int | None = None, **options: Any) -> Any:
    """What two epochs of `fit` add to the weights."""
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    lengths = random.integers(2, LENGTH + 1, size=(SAMPLES, 1))
    words = random.integers(1, WORDS, size=(SAMPLES, LENGTH)) * (np.arange(LENGTH) < lengths)

    inputs = keras.Input((LENGTH,))
    hidden = layers.Embedding(WORDS, 16, mask_zero=True)(inputs)
    hidden = layers.Dense(32, activation="relu")(hidden)
    model = cls(inputs, layers.Dense(WORDS)(hidden), **options)
    start = np.concatenate([weight.ravel() for weight in model.get_weights()])
    model.compile(
        keras.optimizers.SGD(1.0, momentum=0.9, gradient_accumulation_steps=own_steps),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(words, words, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()]) - start


def main() -> None:
    whole = trained(keras.Model, 32)
    own = trained(keras.Model, 8, own_steps=STEPS)
    exact = trained(GradientAccumulateModel, 8, accum_steps=STEPS)
    for name, found in (("gradient_accumulation_steps", own), ("GradientAccumulateModel", exact)):
        error = np.linalg.norm(found - whole) / np.linalg.norm(whole)
        print(f"{name:28} distance to batches of 32: {error:.1e}")


if __name__ == "__main__":
    main()
