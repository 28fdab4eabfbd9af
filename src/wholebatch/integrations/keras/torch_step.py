"""The micro-step on the torch backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from wholebatch.integrations.keras.loss_units import (
    first_of,
    look_with_variables,
    losses_by_units,
)

__all__ = ["train_function"]


def micro_step(model: Any, data: Any) -> Any:
    """Run Keras's own `train_step`, except that the gradient goes into the window."""
    import torch

    if model.must_look:
        with torch.no_grad():
            model.must_look = not look_with_variables(
                model, data, lambda inputs: _losses(model, inputs, training=False)[-1]
            )
    x, y, sample_weight = inputs = keras.utils.unpack_x_y_sample_weight(data)
    optimizer = model.optimizer
    y_pred, loss, groups = _losses(model, inputs, training=True)
    model._loss_tracker.update_state(loss, sample_weight=first_of(x).shape[0])
    optimizer.hold([group.units is None for group in groups])
    weighted = optimizer.weighted(groups)
    values = [weight.value for weight in model.trainable_weights]
    gradients = [
        torch.autograd.grad(each, values, retain_graph=index + 1 < len(weighted), allow_unused=True)
        for index, each in enumerate(weighted)
    ]
    place = optimizer.place + 1
    with torch.no_grad():
        optimizer.add(gradients, [group.units for group in groups], weighted)
        if place >= model.accum_steps:
            optimizer.close()
            place = 0
    optimizer.moved_to(place)
    if place == 0:
        optimizer.report_skipped()
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _losses(model: Any, inputs: tuple[Any, Any, Any], *, training: bool) -> Any:
    """Return the predictions, the loss, and the losses by units."""
    x = inputs[0]
    y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
    samples = first_of(x).shape[0]
    return y_pred, *losses_by_units(model, inputs, y_pred, samples, training=training)


def train_function(model: Any) -> Callable[[Any], Any]:
    import torch

    if model.steps_per_execution > 1:
        raise ValueError(
            "`steps_per_execution` must be 1 with the PyTorch backend. "
            f"Received: steps_per_execution={model.steps_per_execution}"
        )

    def function(data: Any) -> Any:
        return micro_step(model, data[0])

    return torch.compile(function) if model._should_torch_compile() else function
