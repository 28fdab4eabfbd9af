"""The train step on the JAX backend, where a loss cannot hand its units to the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras

from wholebatch.integrations.keras.loss_units import NO_UNITS, Inputs, check_halves, halves, wide


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


def _loss(model: Any, state: Any, inputs: Inputs, *, training: bool = True) -> tuple[Any, Any, Any]:
    """Return the loss of a micro-batch and its units (as JAXTrainer.compute_loss_and_updates)."""
    trainable, non_trainable, _, metrics = state
    given = {"training": training} if model._call_has_training_arg else {}
    y_pred, non_trainable, added = model.stateless_call(
        trainable, non_trainable, inputs[0], return_losses=True, **given
    )
    if added:
        model._losses_override.clear()
        model._losses_override = added
    mapping = [
        *zip(model.trainable_variables, trainable, strict=True),
        *zip(model.non_trainable_variables, non_trainable, strict=True),
        *zip(model.metrics_variables, metrics, strict=True),
    ]
    try:
        with keras.StatelessScope(state_mapping=mapping) as scope:
            loss, units = model.loss_and_units(*inputs, y_pred, training=training)
        non_trainable = [scope.get_current_value(v) for v in model.non_trainable_variables]
        metrics = [scope.get_current_value(v) for v in model.metrics_variables]
    finally:
        if added:
            model._losses_override.clear()
    return loss, units, (y_pred, non_trainable, metrics)


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

    one = jnp.ones((), wide())
    return _add(optimizer, list(variables), trainable, grads, one, one)


def flush(optimizer: Any) -> None:
    """Close a half-filled window."""
    import jax

    own, trained = optimizer.variables, optimizer._trainable_variables
    close = jax.jit(partial(_closed, optimizer))
    trainable, variables = close([v.value for v in own], [v.value for v in trained])
    for variable, value in zip([*trained, *own], [*trainable, *variables], strict=True):
        variable.assign(value)


def test_stateless_model(model: Any, state: Any, data: Any) -> bool:
    """Test this micro-batch; return False if it cannot be halved."""
    import jax

    parts = halves(data)
    if parts is None:
        return False
    is_sum: list[bool] = []

    def evaluate(state: Any, parts: Any) -> Any:
        found = []
        for part in parts:
            inputs = keras.utils.unpack_x_y_sample_weight(part)
            loss, units, _ = _loss(model, state, inputs, training=False)
            is_sum.append(units is NO_UNITS)
            found.append((loss, loss if units is NO_UNITS else units))
        return found

    found = (evaluate if model.run_eagerly else jax.jit(evaluate))(state, parts)
    try:
        check_halves([(loss, NO_UNITS if is_sum[0] else units) for loss, units in found])
    except Exception:
        names = ("trainable", "non_trainable", "optimizer", "metrics")
        # A fit has emptied the variables; it puts these values back when it ends.
        model._jax_state = {
            f"{name}_variables": values for name, values in zip(names, state, strict=True)
        }
        raise
    return True
