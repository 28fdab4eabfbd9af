"""The train step on the JAX backend, where a loss cannot pass its units to the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras

from wholebatch.integrations.keras.loss_units import NO_UNITS, Inputs, run_loss, wide


def train_step(model: Any, state: Any, data: Any) -> Any:
    """Run Keras's own `train_step`, except that the gradient goes into the window."""
    import jax

    trainable, _, variables, _ = state
    x, y, sample_weight = inputs = keras.utils.unpack_x_y_sample_weight(data)
    optimizer, is_sum = model.optimizer, []

    def scaled(trainable: Any) -> Any:
        loss, units, aux = _loss(model, (trainable, *state[1:]), inputs)
        is_sum.append(units is NO_UNITS)
        with _scope(optimizer, variables):
            value = optimizer.inner_optimizer.scale_loss(loss)
        return value, (loss, None if units is NO_UNITS else units, aux)

    (_, (loss, units, aux)), gradients = jax.value_and_grad(scaled, has_aux=True)(trainable)
    units = NO_UNITS if is_sum[0] else units
    y_pred, non_trainable, metrics = aux
    trainable, variables = _add(optimizer, variables, trainable, gradients, units, loss)
    logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
    return logs, (trainable, non_trainable, variables, metrics)


def _loss(model: Any, state: Any, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Return the loss of a micro-batch, its units, and the outputs and variables after it."""
    with model_scope(model, state) as scope:
        loss, units, y_pred = run_loss(model, inputs, training=True)
        non_trainable = [scope.get_current_value(v) for v in model.non_trainable_variables]
        metrics = [scope.get_current_value(v) for v in model.metrics_variables]
    return loss, units, (y_pred, non_trainable, metrics)


def model_scope(model: Any, state: Any) -> Any:
    """Return a scope in which the model's variables have the values of a state."""
    trainable, non_trainable, _, metrics = state
    mapping = [
        *zip(model.trainable_variables, trainable, strict=True),
        *zip(model.non_trainable_variables, non_trainable, strict=True),
        *zip(model.metrics_variables, metrics, strict=True),
    ]
    return keras.StatelessScope(state_mapping=mapping, collect_losses=True)


def _scope(optimizer: Any, variables: Sequence[Any]) -> Any:
    mapping = list(zip(optimizer.variables, variables, strict=True))
    return keras.StatelessScope(state_mapping=mapping)


def _add(
    optimizer: Any, variables: Any, trainable: Any, gradients: Any, units: Any, loss: Any
) -> Any:
    """Run the optimizer's `add` on the variables' values, and close a window that is full."""
    import jax

    with _scope(optimizer, variables) as scope:
        optimizer.add(gradients, units, loss)
        full = optimizer.is_full()
    own = [scope.get_current_value(v) for v in optimizer._variables]
    variables = [*own, *variables[len(own) :]]
    return jax.lax.cond(
        full,
        partial(_closed, optimizer),
        lambda variables, trainable: (trainable, variables),
        variables,
        list(trainable),
    )


def _closed(
    optimizer: Any, variables: Sequence[Any], trainable: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return weights and variables after the update from what is in the window."""
    import jax

    with _scope(optimizer, variables) as scope:
        means, finite = optimizer.mean_gradients()
        if not optimizer.scaled:
            optimizer.count_skipped(finite)
        optimizer.clear()
    own = [scope.get_current_value(v) for v in optimizer._variables]
    inner, apply = list(variables[len(own) :]), optimizer.inner_optimizer.stateless_apply

    def applied(inner: Any, trainable: Any) -> tuple[list[Any], list[Any]]:
        weights, values = apply(inner, means, trainable)
        return list(weights), list(values)

    if optimizer.scaled:
        weights, values = applied(inner, list(trainable))
    else:
        weights, values = jax.lax.cond(
            finite, applied, lambda inner, trainable: (trainable, inner), inner, list(trainable)
        )
    return weights, [*own, *values]


def stateless_apply(optimizer: Any, variables: Any, grads: Any, trainable: Any) -> Any:
    """Apply a `GradientAccumulateOptimizer` used alone, whose micro-batches count alike."""
    import jax.numpy as jnp

    unit = jnp.ones((), wide())
    return _add(optimizer, list(variables), trainable, grads, unit, unit)


def flush(optimizer: Any) -> None:
    """Close a half-filled window."""
    import jax

    own, trained = optimizer.variables, optimizer._trainable_variables
    close = jax.jit(partial(_closed, optimizer))
    trainable, variables = close([v.value for v in own], [v.value for v in trained])
    for variable, value in zip([*trained, *own], [*trainable, *variables], strict=True):
        variable.assign(value)
