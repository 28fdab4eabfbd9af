"""Keras on torch; `fit` has no several devices there."""

from __future__ import annotations

from compare.keras_problem import rows_of
from compare.row import Row


def rows() -> list[Row]:
    # In float64 too Keras rounds the mean loss to float32 on this backend (divide_no_nan), and
    # with it the gradient, in its own whole-batch training as well.
    return rows_of("torch", precision="float32")
