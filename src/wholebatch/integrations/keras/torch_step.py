"""The micro-step on the torch backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import tree

from wholebatch.integrations.keras.keras_look import look_with_variables
from wholebatch.integrations.keras.loss_units import groups_of, wide

__all__ = ["symbolic_build", "train_function"]


def micro_step(model: Any, data: Any) -> Any:
    """Run Keras's own `train_step`, except that the gradient goes into the window."""
    import torch

    if model.must_look:
        model.must_look = not look(model, data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    optimizer = model.optimizer
    y_pred, loss, samples, groups = _losses(model, x, y, sample_weight, training=True)
    model._loss_tracker.update_state(loss, sample_weight=samples)
    optimizer.hold([group.units is None for group in groups])
    weights = model.trainable_weights
    weighted = optimizer.weighted(groups)
    values = [weight.value for weight in weights]
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


def _losses(model: Any, x: Any, y: Any, sample_weight: Any, *, training: bool) -> Any:
    """Return the predictions, the loss, the number of samples and the losses by units."""
    import torch

    samples = next(each for each in tree.flatten(x) if each is not None).shape[0]
    y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
    loss = model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )
    counted = None if model.count_units is None else model.count_units(x, y, sample_weight)
    groups = groups_of(
        model,
        loss,
        samples=torch.tensor(float(samples), dtype=getattr(torch, wide()), device=loss.device),
        units=counted,
        replicas=1,
    )
    return y_pred, loss, samples, groups


def look(model: Any, data: Any) -> bool:
    import torch

    with torch.no_grad():
        return look_with_variables(
            model,
            data,
            lambda x, y, weight: _losses(model, x, y, weight, training=False)[-1],
        )


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


def symbolic_build(model: Any, build: Callable[..., None], iterator: Any, data_batch: Any) -> None:
    build(iterator=iterator, data_batch=data_batch)
