"""A Keras model over padded sequences: windows of 4 micro-batches of 8, beside batches of 32.

Run: python examples/integrations/keras_windows.py          (KERAS_BACKEND chooses the backend)

The change from Keras's own accumulation (docs/integrations/keras.md):

    - model = keras.Model(inputs, outputs)
    - model.compile(keras.optimizers.SGD(1.0, gradient_accumulation_steps=4), loss)
    + from wholebatch.integrations.keras import GradientAccumulateModel
    + model = GradientAccumulateModel(inputs, outputs, accum_steps=4)
    + model.compile(keras.optimizers.SGD(1.0), loss)

It trains with batches of 32, then before the change and after it, and prints how far both are from
the batches of 32.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from wholebatch.integrations.keras import GradientAccumulateModel

SAMPLES, LENGTH, WORDS, STEPS = 90, 12, 50, 4


def trained(cls: Any, batch_size: int, *, own_steps: int | None = None, **options: Any) -> Any:
    """Return the change of the weights in two epochs of `fit`."""
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
    before, after = (np.linalg.norm(one - whole) / np.linalg.norm(whole) for one in (own, exact))
    print(
        f"Shown: the change of the weights is off by {before:.0%} with Keras's own accumulation, "
        f"by {after:.0e} with GradientAccumulateModel."
    )


if __name__ == "__main__":
    main()
