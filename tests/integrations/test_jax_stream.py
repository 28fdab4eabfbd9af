"""`multi_steps`: windows of micro-batches that come one by one are the undivided batches."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from tests.integrations.blocks import run_diff  # noqa: E402
from tests.integrations.jax_problem import (  # noqa: E402
    cut,
    distance,
    loss_mean,
    minus,
    problem,
    quick_float64,
)
from wholebatch.errors import MissingExtraError  # noqa: E402
from wholebatch.integrations.jax import flush, has_updated, multi_steps  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with quick_float64():
        yield


def windows(
    tx: Any,
    params: Any,
    parts: list[Any],
    last: Callable[[int], bool] = lambda i: False,
    through: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Train over micro-batches, one window after the other, in a jitted step."""

    @partial(jax.jit, donate_argnums=1)
    def step(params: Any, state: Any, micro: Any, last: Any) -> Any:
        gradient = jax.grad(loss_mean)(params, micro)
        updates, state = tx.update(gradient, state, params, units=micro["mask"].sum(), last=last)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for index, micro in enumerate(parts):
        if through is not None:
            params, state = through((params, state))
        params, state = step(params, state, micro, last(index))
    return params, state


@pytest.mark.parametrize("optimizer", ["adamw", "clipped"])
def test_multi_steps_are_the_undivided_windows(optimizer: str) -> None:
    """Windows of three uneven micro-batches, and a tail of one."""
    inner = {
        "adamw": optax.adamw(0.1, weight_decay=0.1),
        "clipped": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.3, momentum=0.9)),
    }[optimizer]
    params, batch = problem()
    parts = cut(batch, (2, 3, 5, 6, 8, 10, 11))
    tx = multi_steps(inner, every_k=3)
    tail = "flush" if optimizer == "adamw" else "last"
    got, state = windows(tx, params, parts, last=lambda i: tail == "last" and i == 6)
    if tail == "flush":
        assert int(state.updates) == 2
        updates, state = jax.jit(lambda state, params: flush(tx, state, params))(state, got)
        got = jax.tree.map(np.add, got, updates)
    assert int(state.updates) == 3
    assert bool(has_updated(state))

    want, inner_state = undivided(inner, loss_mean, params, cut(batch, (5, 10, 11)))
    moved = minus(want, params)
    assert distance(minus(got, params), moved) <= 1e-12
    assert distance((got, state.inner), (want, inner_state)) <= 1e-12
    if optimizer == "clipped":
        assert distance(minus(windows_of_optax(inner, params, parts), params), moved) > 1e-2


def undivided(inner: Any, loss: Any, params: Any, batches: list[Any]) -> tuple[Any, Any]:
    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = inner.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(inner.init)(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return params, state


def windows_of_optax(inner: Any, params: Any, parts: list[Any]) -> Any:
    tx = optax.MultiSteps(inner, every_k_schedule=3, accumulator_dtype=jnp.float64)

    @jax.jit
    def step(params: Any, state: Any, micro: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_mean)(params, micro), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for micro in parts:
        params, state = step(params, state, micro)
    return params


def test_a_window_survives_being_saved() -> None:
    params, batch = problem()
    tx = multi_steps(optax.adam(0.1), every_k=lambda updates: 2 + updates)
    parts = cut(batch, (2, 3, 5, 6, 8))
    want, want_state = windows(tx, params, parts)
    assert int(want_state.updates) == 2
    got, state = windows(
        tx, params, parts, through=lambda state: pickle.loads(pickle.dumps(jax.device_get(state)))
    )
    assert distance((got, state.total), (want, want_state.total)) <= 1e-12


def test_a_window_without_units_makes_no_update() -> None:
    params = jnp.ones(2)
    tx = multi_steps(optax.adam(0.1), every_k=1)
    updates, state = tx.update(jnp.full(2, 5.0), tx.init(params), params, units=0)
    assert float(jnp.abs(updates).sum()) == 0.0
    assert int(state.updates) == int(state.place) == int(state.inner[0].count) == 0
    # Within a window it adds nothing, though the gradient of its mean is 0/0.
    tx = multi_steps(optax.sgd(1.0), every_k=2)
    _, state = tx.update(jnp.full(2, jnp.nan), tx.init(params), params, units=0)
    updates, _ = tx.update(jnp.full(2, 5.0), state, params, units=3)
    assert updates.tolist() == [-5.0, -5.0]


def test_sums_of_16_bit_gradients() -> None:
    params = jnp.zeros(1, jnp.bfloat16)
    tx = multi_steps(optax.sgd(1.0), every_k=300, of="sum")

    def step(state: Any, gradient: Any) -> Any:
        updates, state = tx.update(gradient, state, params, units=1)
        return state, updates

    _, updates = jax.lax.scan(step, tx.init(params), jnp.ones((300, 1), jnp.bfloat16))
    assert updates.dtype == jnp.bfloat16
    assert float(updates[-1, 0]) == -1.0  # in bfloat16, 256 + 1 is 256


def test_wide_gradients_of_16_bit_parameters() -> None:
    """Adam's moments widen as they do without windows, whichever call closes the window."""
    params = jnp.full(3, 0.5, jnp.bfloat16)
    gradients = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    units, inner = np.array([3, 1, 4, 1, 5, 9, 2]), optax.adam(0.1, b1=0.5)
    for how in ("last", "flush"):
        tx = multi_steps(inner, every_k=3)
        state, moved, update = tx.init(params), [], jax.jit(tx.update)
        for index in range(7):
            closing = how == "last" and index == 6
            made, state = update(gradients[index], state, params, units=units[index], last=closing)
            moved.append(made)
        if how == "flush":
            made, state = flush(tx, state, params)
            moved.append(made)
        want, want_state = jnp.zeros(3), inner.init(params)
        for window in (slice(0, 3), slice(3, 6), slice(6, 7)):
            mean = np.average(gradients[window], axis=0, weights=units[window]).astype(np.float32)
            made, want_state = inner.update(mean, want_state, params)
            want = want + made
        assert state.inner[0].mu.dtype == want_state[0].mu.dtype == jnp.float32
        assert distance((sum(moved), state.inner), (want, want_state)) <= 1e-6, how


def test_the_change_of_the_page_in_a_stream() -> None:
    """The second diff: MultiSteps is wrong on its data, and the changed script is not."""
    before, after = run_diff(ROOT / "docs/integrations/jax.md", 1)
    data = jax.device_get(after["data"])
    params, _ = undivided(after["inner"], after["loss_fn"], np.zeros(4), cut(data, (8, 18, 22)))
    assert distance(after["params"], params) <= 1e-12
    assert distance(before["params"], params) > 1e-2


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.1.4")
    with pytest.raises(MissingExtraError, match=r"optax>=0.2.5 \(installed is 0.1.4\)"):
        multi_steps(optax.sgd(0.1), every_k=2)


def test_a_window_that_is_not_finite_makes_no_update() -> None:
    params = {"w": jnp.ones(3)}
    tx = multi_steps(optax.adamw(0.1, weight_decay=0.1), every_k=2)
    state = tx.init(params)
    seen = []
    for value in (1.0, np.nan, 2.0, 3.0):
        updates, state = tx.update({"w": jnp.full(3, value)}, state, params, units=4)
        seen.append(float(jnp.abs(updates["w"]).sum()))
    assert seen[:3] == [0, 0, 0]  # the window with a NaN moves nothing, nor does its successor yet
    assert seen[3] > 0
    assert np.isfinite(seen).all()
    assert (int(state.updates), int(state.skipped)) == (1, 1)
    inner = optax.adamw(0.1, weight_decay=0.1)
    whole, _ = inner.update({"w": jnp.full(3, 2.5)}, inner.init(params), params)
    assert distance({"w": updates["w"]}, {"w": whole["w"]}) <= 1e-12


def test_has_updated_is_true_after_an_update_only() -> None:
    """Not after a window that was skipped, whether it is the first or a later one."""
    params = jnp.ones(3)
    for jit in (jax.jit, lambda function: function):
        tx = multi_steps(optax.sgd(0.1), every_k=2)
        state, seen, update = tx.init(params), [bool(has_updated(tx.init(params)))], jit(tx.update)
        for value in (1.0, np.nan, 1.0, 2.0, np.inf, 1.0, 3.0, 3.0):
            _, state = update(jnp.full(3, value), state, params, units=4)
            seen.append(bool(has_updated(state)))
        assert seen == [False, False, False, False, True, False, False, False, True]
        _, state = flush(tx, state, params)  # no window is open
        assert not has_updated(state)
