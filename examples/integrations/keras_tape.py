"""A loop of your own around tf.GradientTape: one exact update per window of micro-batches.

python examples/integrations/keras_tape.py

No adapter is needed. The change from a loop that averages the gradients of means:

    - loss = tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)
    - optimizer.apply([held / steps for held in sums], variables)
    + total = tf.reduce_sum(losses * mask)
    + units.assign_add(tf.reduce_sum(mask))
    + optimizer.apply([held / units for held in sums], variables)
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=4, help="micro-batches in a window")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save", help="write the trained weights here")
options = parser.parse_args()

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((6, 4), dtype="float64"),
        keras.layers.Dense(16, activation="relu", dtype="float64"),
        keras.layers.Dense(3, dtype="float64"),
    ]
)
optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
variables = model.trainable_variables
draw = np.random.default_rng(0)
x, y = draw.normal(size=(86, 6, 4)), draw.normal(size=(86, 6, 3))
mask = np.arange(6) < draw.integers(1, 7, size=(86, 1))  # places that count

# An open window: the sums of gradients, and what they are sums over.
sums = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in variables]
units = tf.Variable(0.0, dtype="float64", trainable=False)


@tf.function(reduce_retracing=True)
def add(x, y, mask):
    """Add the gradient of a micro-batch's sum, and the places that it is a sum over."""
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(tf.square(model(x, training=True) - y), axis=-1)
        total = tf.reduce_sum(losses * mask)  # a sum, not a mean
    for held, gradient in zip(sums, tape.gradient(total, variables), strict=True):
        held.assign_add(gradient)
    units.assign_add(tf.reduce_sum(mask))


@tf.function
def close():
    """Make the update of the whole window: divide once, by all units."""
    optimizer.apply([held / units for held in sums], variables)
    for held in (*sums, units):
        held.assign(tf.zeros_like(held))


optimizer.build(variables)
for _ in range(options.epochs):
    starts = range(0, len(x), options.micro_batch)
    for index, start in enumerate(starts):
        micro = slice(start, start + options.micro_batch)
        add(*(tf.constant(data[micro], "float64") for data in (x, y, mask)))
        if (index + 1) % options.steps == 0 or index + 1 == len(starts):  # the tail too
            close()

if options.save:
    np.save(options.save, np.concatenate([variable.numpy().ravel() for variable in variables]))
