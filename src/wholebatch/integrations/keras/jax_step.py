"""The micro-step on the JAX backend: pure functions of the state that add or close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras

from wholebatch.integrations.keras.loss_units import (
    Inputs,
    UnitGroup,
    halves,
    look_at,
    losses_by_units,
    wide,
)


def micro_step(model: Any, state: Any, data: Any, *, closes: bool) -> Any:
    """Run Keras's own `train_step`, except that the gradient goes into the window."""
    import jax
    import jax.numpy as jnp

    trainable, _, variables, _ = state
    x, y, sample_weight = inputs = keras.utils.unpack_x_y_sample_weight(data)
    optimizer = model.optimizer

    def losses(trainable: Any) -> Any:
        loss, aux, groups = _losses(model, (trainable, *state[1:]), inputs)
        optimizer.hold([group.units is None for group in groups])
        with _scope(optimizer, variables):
            weighted = optimizer.weighted(groups)
        return jnp.stack(weighted), (loss, aux, [group.units for group in groups])

    weighted, pull_back, (loss, aux, units) = jax.vjp(losses, trainable, has_aux=True)
    unit_vectors = jnp.eye(len(weighted), dtype=weighted.dtype)
    gradients = [pull_back(vector)[0] for vector in unit_vectors]
    y_pred, non_trainable, metrics = aux
    trainable, variables = _into_window(
        optimizer, variables, trainable, gradients, units, list(weighted), closes=closes
    )
    logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
    return logs, (trainable, non_trainable, variables, metrics)


def _losses(
    model: Any, state: Any, inputs: Inputs, *, is_training: bool = True
) -> tuple[Any, Any, list[UnitGroup]]:
    """Compute the losses of a micro-batch by units (as JAXTrainer.compute_loss_and_updates)."""
    trainable, non_trainable, _, metrics = state
    training = {"training": is_training} if model._call_has_training_arg else {}
    y_pred, non_trainable, added = model.stateless_call(
        trainable, non_trainable, inputs[0], return_losses=True, **training
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
            loss, groups = losses_by_units(model, inputs, y_pred, training=is_training)
        non_trainable = [scope.get_current_value(v) for v in model.non_trainable_variables]
        metrics = [scope.get_current_value(v) for v in model.metrics_variables]
    finally:
        if added:
            model._losses_override.clear()
    return loss, (y_pred, non_trainable, metrics), groups


def _into_window(
    optimizer: Any,
    variables: Sequence[Any],
    trainable: Sequence[Any],
    gradients: Sequence[Sequence[Any]],
    units: Sequence[Any],
    losses: Sequence[Any] | None = None,
    *,
    closes: bool,
) -> tuple[Any, list[Any]]:
    """Run the optimizer's `add`, and `close` if asked, as a function of the variables' values."""
    import jax

    with _scope(optimizer, variables) as scope:
        if gradients:
            optimizer.add(gradients, units, losses)
        if closes:
            means, finite = optimizer.mean_gradients()
            if not optimizer.scaled:
                optimizer.count_skipped(finite)
            optimizer.clear()
    own = [scope.get_current_value(v) for v in optimizer._variables]
    inner = list(variables[len(own) :])
    if not closes:
        return trainable, [*own, *inner]
    apply = optimizer.inner_optimizer.stateless_apply
    if optimizer.scaled:
        trainable, inner = apply(inner, means, trainable)
    else:
        trainable, inner = jax.lax.cond(
            finite,
            lambda inner, means, trainable: _lists(apply(inner, means, trainable)),
            lambda inner, means, trainable: (trainable, inner),
            inner,
            means,
            list(trainable),
        )
    return trainable, [*own, *inner]


def _scope(optimizer: Any, variables: Sequence[Any]) -> Any:
    mapping = list(zip(optimizer.variables, variables, strict=True))
    return keras.StatelessScope(state_mapping=mapping)


def stateless_apply(optimizer: Any, variables: Any, grads: Any, trainable: Any) -> Any:
    """Apply a `GradientAccumulateOptimizer` used alone; the device decides if a window closes."""
    import jax
    import jax.numpy as jnp

    step = partial(_into_window, optimizer, gradients=[grads], units=[jnp.ones((), wide())])
    with _scope(optimizer, variables):
        is_last = optimizer.is_last_place()
    return jax.lax.cond(
        is_last,
        lambda variables, trainable: _lists(step(variables, trainable, closes=True)),
        lambda variables, trainable: _lists(step(variables, trainable, closes=False)),
        list(variables),
        list(trainable),
    )


def _lists(pair: tuple[Any, Any]) -> tuple[list[Any], list[Any]]:
    return list(pair[0]), list(pair[1])


def flush(optimizer: Any) -> None:
    """Close a half-filled window."""
    import jax

    close = jax.jit(
        lambda variables, trainable: _into_window(
            optimizer, variables, trainable, [], [], closes=True
        )
    )
    own, trained = optimizer.variables, optimizer._trainable_variables
    trainable, variables = close([v.value for v in own], [v.value for v in trained])
    for variable, value in zip([*trained, *own], [*trainable, *variables], strict=True):
        variable.assign(value)


def look(model: Any, state: Any, data: Any) -> bool:
    """Look at this micro-batch; return False if it cannot be halved."""
    import jax

    parts = halves(data)
    if parts is None:
        return False

    def evaluate(state: Any, parts: Any) -> Any:
        found = []
        for part in parts:
            inputs = keras.utils.unpack_x_y_sample_weight(part)
            *_, groups = _losses(model, state, inputs, is_training=False)
            found.append([(group.loss, group.units) for group in groups])
        return found

    found = (evaluate if model.run_eagerly else jax.jit(evaluate))(state, parts)
    try:
        look_at([[UnitGroup(*pair) for pair in pairs] for pairs in found])
    except Exception:
        names = ("trainable", "non_trainable", "optimizer", "metrics")
        # A fit has emptied the variables; it puts these values back when it ends.
        model._jax_state = {
            f"{name}_variables": values for name, values in zip(names, state, strict=True)
        }
        raise
    return True


def train_function(model: Any) -> Callable[[Any, Any], Any]:
    """Return what `fit` calls for every micro-batch, a function of the state and the data."""
    import jax

    def compiled(closes: bool) -> Callable[[Any, Any], Any]:
        step = partial(micro_step, model, closes=closes)
        if model.run_eagerly or not model.jit_compile:
            return step
        shardings = None
        if keras.distribution.distribution() is not None:
            shardings = (None, model._get_state_sharding_spec())
        return jax.jit(step, donate_argnums=0, out_shardings=shardings)

    adds, closes = compiled(False), compiled(True)

    def one_step(state: Any, data: Any) -> Any:
        if model.must_look:
            model.must_look = not look(model, state, data)
        place = model.optimizer.place + 1
        closing = place >= model.accum_steps
        result = (closes if closing else adds)(state, data)
        model.optimizer.moved_to(0 if closing else place)
        return result

    return model._make_function(one_step)  # type: ignore[no-any-return]


def symbolic_build(model: Any, build: Callable[..., None], iterator: Any, data_batch: Any) -> None:
    """Find the groups of units of the losses before the state is passed to JAX."""
    import jax

    if data_batch is None and iterator is not None:
        for _, _, data_or_iterator in iterator:
            listed = isinstance(data_or_iterator, (list, tuple))
            data_batch = data_or_iterator[0] if listed else next(data_or_iterator)
            break
    optimizer = model.optimizer
    unbuilt = not optimizer.built
    build(data_batch=data_batch)
    if not unbuilt or model._compile_loss is None:
        return
    found: list[bool] = []

    def discover(state: Any, inputs: Any) -> None:
        *_, groups = _losses(model, state, inputs)
        found.extend(group.units is None for group in groups)

    state = tuple(
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
            model.metrics_variables,
        )
    )
    jax.eval_shape(discover, state, keras.utils.unpack_x_y_sample_weight(data_batch))
    optimizer.hold(found)
