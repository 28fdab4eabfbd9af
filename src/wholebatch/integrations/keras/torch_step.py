"""The micro-step on the torch backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from wholebatch.integrations.keras.loss_units import look_with_variables, run_losses, samples_in


def micro_step(model: Any, data: Any) -> Any:
    """Run Keras's own `train_step`, except that the gradient goes into the window."""
    if model.must_look:
        with torch.no_grad():
            model.must_look = not look_with_variables(model, data)
    x, y, sample_weight = inputs = keras.utils.unpack_x_y_sample_weight(data)
    optimizer = model.optimizer
    y_pred, loss, groups = run_losses(model, inputs, training=True)
    model._loss_tracker.update_state(loss, sample_weight=samples_in(x))
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


def train_function(model: Any) -> Callable[[Any], Any]:
    if model.steps_per_execution > 1:
        raise ValueError(
            "`steps_per_execution` must be 1 with the PyTorch backend. "
            f"Received: steps_per_execution={model.steps_per_execution}"
        )

    def function(data: Any) -> Any:
        return micro_step(model, data[0])

    return torch.compile(function) if model._should_torch_compile() else function
