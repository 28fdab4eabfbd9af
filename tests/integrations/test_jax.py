"""JAX: `accumulate` and `multi_steps` are the undivided batch, on two devices too."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from tests.integrations.blocks import run_diff  # noqa: E402
from wholebatch.errors import (  # noqa: E402
    LossError,
    MissingExtraError,
    OptionError,
    SplitError,
    WindowError,
)
from wholebatch.integrations.jax import (  # noqa: E402
    accumulate,
    flush,
    has_updated,
    multi_steps,
)

ROOT = Path(__file__).parents[2]
SAMPLES, LENGTH, CLASSES = 11, 5, 7
MICRO_BATCHES = (1, 4, 64)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def problem(dtype: Any = np.float64) -> tuple[Any, Any]:
    """Parameters, and a batch of sequences with very different numbers of unmasked tokens."""
    random = np.random.default_rng(0)
    params = {
        "in": random.normal(size=(4, 6)).astype(dtype),
        "out": random.normal(size=(6, CLASSES)).astype(dtype),
    }
    lengths = random.integers(1, LENGTH + 1, size=SAMPLES)
    batch = {
        "x": random.normal(size=(SAMPLES, LENGTH, 4)).astype(dtype),
        "y": random.integers(0, CLASSES, size=(SAMPLES, LENGTH)),
        "mask": np.arange(LENGTH) < lengths[:, None],
    }
    return params, batch


def token_losses(params: Any, batch: Any) -> Any:
    logits = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]) * batch["mask"]


def loss_sum(params: Any, batch: Any) -> Any:
    return token_losses(params, batch).sum(), batch["mask"].sum()


def loss_mean(params: Any, batch: Any) -> Any:
    return token_losses(params, batch).sum() / batch["mask"].sum()


def distance(got: Any, want: Any) -> float:
    """Relative L2 distance of two trees (in numpy: jax would compile every operation)."""
    flat = [
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (got, want)
    ]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


whole_batch = jax.jit(jax.value_and_grad(loss_mean))


def minus(got: Any, start: Any) -> Any:
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), got, start)


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_masked_tokens_are_the_undivided_batch(micro_batch: int) -> None:
    params, batch = problem()
    value, gradient = jax.jit(accumulate(loss_sum, micro_batch=micro_batch))(params, batch)
    want, want_gradient = whole_batch(params, batch)
    assert abs(float(value - want)) <= 1e-12 * abs(float(want))
    assert distance(gradient, want_gradient) <= 1e-12


def test_a_mean_with_its_units() -> None:
    params, batch = problem()
    want = whole_batch(params, batch)
    got = jax.jit(accumulate(loss_mean, micro_batch=3, units=lambda batch: batch["mask"].sum()))(
        params, batch
    )
    assert distance(got, want) <= 1e-12

    def by_sample(params: Any, batch: Any) -> Any:
        return token_losses(params, batch).sum(axis=1).mean()

    want = jax.jit(jax.value_and_grad(by_sample))(params, batch)
    got = jax.jit(accumulate(by_sample, micro_batch=4, units="samples"))(params, batch)
    assert distance(got, want) <= 1e-12


def test_argnums_keywords_and_several_batch_arguments() -> None:
    params, batch = problem()

    def loss(x: Any, first: Any, y: Any, second: Any, *, scale: float) -> Any:
        total, units = loss_sum({"in": first, "out": second}, {"x": x, **y})
        return total * scale, units

    rest = {name: batch[name] for name in ("y", "mask")}
    got = jax.jit(accumulate(loss, micro_batch=4, argnums=(3, 1), batch_argnums=(0, 2)))(
        batch["x"], params["in"], rest, params["out"], scale=2.0
    )
    value, gradient = whole_batch(params, batch)
    assert distance(got, (2 * value, (2 * gradient["out"], 2 * gradient["in"]))) <= 1e-12


@pytest.mark.parametrize("micro_batch", [3, 11])
def test_aux_is_that_of_the_undivided_batch(micro_batch: int) -> None:
    params, batch = problem()

    def loss(params: Any, batch: Any) -> Any:
        aux = {"logits": batch["x"] @ params["in"], "mask": batch["mask"]}
        return loss_sum(params, batch), aux

    def counts(params: Any, batch: Any) -> Any:
        return loss_sum(params, batch), batch["mask"].sum()

    @jax.jit
    def every(params: Any, batch: Any) -> Any:
        return (
            accumulate(loss, micro_batch=micro_batch, has_aux=True, aux="concat")(params, batch),
            accumulate(counts, micro_batch=micro_batch, has_aux=True, aux="sum")(params, batch),
            accumulate(counts, micro_batch=micro_batch, has_aux=True)(params, batch),
        )

    ((value, aux), gradient), ((_, summed), _), ((_, stacked), _) = every(params, batch)
    assert distance((value, gradient), whole_batch(params, batch)) <= 1e-12
    np.testing.assert_array_equal(aux["mask"], batch["mask"])
    np.testing.assert_allclose(aux["logits"], batch["x"] @ params["in"], rtol=1e-12)
    assert int(summed) == int(np.asarray(stacked).sum()) == int(batch["mask"].sum())
    assert stacked.shape == (-(-SAMPLES // micro_batch),)


def test_16_bit_gradients_are_added_in_float32() -> None:
    """256 micro-batches: added in bfloat16 the error is that of 256 roundings."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(256, 8)) + 3.0, jnp.bfloat16)
    weight = jnp.ones(8, jnp.bfloat16)

    def loss(weight: Any, x: Any) -> Any:
        return jnp.sum(x @ weight), x.shape[0]

    value, gradient = jax.jit(accumulate(loss, micro_batch=1))(weight, x)
    assert gradient.dtype == jnp.bfloat16
    assert value.dtype == jnp.float32
    exact = np.asarray(x, np.float64).mean(axis=0)
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)
    np.testing.assert_array_equal(np.asarray(gradient, np.float64), rounded)
    one_by_one = np.zeros(8, jnp.bfloat16)
    for row in np.asarray(x):
        one_by_one = one_by_one + row
    wrong = np.asarray(one_by_one, np.float64) / 256 - exact
    assert np.linalg.norm(wrong) > 1e-2 * np.linalg.norm(exact)


def test_half_precision_does_not_overflow() -> None:
    x = jnp.full((4096, 1), 100.0, jnp.float16)
    _, gradient = accumulate(
        lambda w, x: (jnp.sum(x @ w, dtype=jnp.float32), x.shape[0]), micro_batch=2048
    )(jnp.ones(1, jnp.float16), x)
    assert float(gradient[0]) == 100.0


def test_buffers_are_donated() -> None:
    params, batch = problem()
    gradient_of = accumulate(loss_sum, micro_batch=2)

    def step(params: Any, batch: Any) -> Any:
        value, gradient = gradient_of(params, batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    donating = jax.jit(step, donate_argnums=0).lower(params, batch).compile()
    sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert donating.memory_analysis().alias_size_in_bytes == sizes


def test_memory_is_that_of_a_micro_batch() -> None:
    params, _ = problem()
    wide = {"in": params["in"], "out": jnp.zeros((6, 4000))}
    batch = {
        "x": jnp.zeros((64, LENGTH, 4)),
        "y": jnp.zeros((64, LENGTH), int),
        "mask": jnp.ones((64, LENGTH), bool),
    }

    def temporary(function: Callable[..., Any]) -> int:
        size = jax.jit(function).lower(wide, batch).compile().memory_analysis().temp_size_in_bytes
        return int(size)

    whole = temporary(jax.value_and_grad(loss_mean))
    assert temporary(accumulate(loss_sum, micro_batch=4)) < 0.25 * whole


REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "micro_batch": (lambda: accumulate(loss_sum, micro_batch=0), OptionError, "micro_batch=0"),
    "aux": (
        lambda: accumulate(loss_sum, micro_batch=1, aux="mean"),  # type: ignore[arg-type]
        OptionError,
        "aux='mean'",
    ),
    "both": (
        lambda: accumulate(loss_sum, micro_batch=1, batch_argnums=0),
        OptionError,
        "either split or differentiated",
    ),
    "a bare scalar": (
        lambda: jax.eval_shape(accumulate(loss_mean, micro_batch=2), *problem()),
        LossError,
        "may be a sum or a mean",
    ),
    "per-sample losses": (
        lambda: jax.eval_shape(
            accumulate(token_losses, micro_batch=2, units="samples"), *problem()
        ),
        LossError,
        "single number",
    ),
    "no first axis": (
        lambda: accumulate(loss_sum, micro_batch=2)(problem()[0], {"x": jnp.ones(3), "t": 1.0}),
        SplitError,
        r"argument 1\['t'\] has no first axis",
    ),
    "sizes": (
        lambda: accumulate(loss_sum, micro_batch=2)(
            problem()[0], {"x": jnp.ones(3), "y": jnp.ones(2)}
        ),
        SplitError,
        r"\['x'\] has 3, argument 1\['y'\] has 2",
    ),
    "stack": (
        lambda: jax.eval_shape(
            accumulate(lambda p, b: (loss_sum(p, b), b["x"]), micro_batch=2, has_aux=True),
            *problem(),
        ),
        LossError,
        'aux="concat"',
    ),
    "every_k": (lambda: multi_steps(optax.sgd(0.1), every_k=0), OptionError, "every_k=0"),
    "units": (
        lambda: (tx := multi_steps(optax.sgd(0.1), 2)).update(
            jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1)
        ),
        WindowError,
        "update\\(\\) without units=",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    call, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        call()


def windows(
    tx: Any,
    params: Any,
    parts: list[Any],
    last: Callable[[int], bool] = lambda i: False,
    through: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Train over micro-batches, one window after the other, in a jitted step."""

    @jax.jit
    def step(params: Any, state: Any, micro: Any, last: Any) -> Any:
        gradient = jax.grad(loss_mean)(params, micro)
        updates, state = tx.update(gradient, state, params, units=micro["mask"].sum(), last=last)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for index, micro in enumerate(parts):
        if through is not None:
            params, state = through((params, state))
        params, state = step(params, state, micro, last(index))
    return params, state


def cut(batch: Any, ends: tuple[int, ...]) -> list[Any]:
    starts = (0, *ends[:-1])
    return [
        jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], batch)
        for a, b in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "clipped"])
def test_multi_steps_are_the_undivided_windows(optimizer: str) -> None:
    """Windows of three uneven micro-batches, and a tail of one."""
    inner = {
        "sgd": optax.sgd(0.3, momentum=0.9),
        "adamw": optax.adamw(0.1, weight_decay=0.1),
        "clipped": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.3)),
    }[optimizer]
    params, batch = problem()
    parts = cut(batch, (2, 3, 6, 7, 9, 10, 11))
    tx = multi_steps(inner, every_k=3)
    tail = "flush" if optimizer == "adamw" else "last"
    got, state = windows(tx, params, parts, last=lambda i: tail == "last" and i == 6)
    if tail == "flush":
        assert int(state.updates) == 2
        updates, state = jax.jit(lambda state, params: flush(tx, state, params))(state, got)
        got = jax.tree.map(np.add, got, updates)
    assert int(state.updates) == 3
    assert bool(has_updated(state))

    want, inner_state = undivided(inner, loss_mean, params, cut(batch, (6, 10, 11)))
    moved = minus(want, params)
    assert distance(minus(got, params), moved) <= 1e-12
    assert distance((got, state.inner), (want, inner_state)) <= 1e-12
    if optimizer == "sgd":
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
    parts = cut(batch, (2, 3, 6, 7, 11))
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


def test_sums_of_16_bit_gradients() -> None:
    params = jnp.zeros(1, jnp.bfloat16)
    tx = multi_steps(optax.sgd(1.0), every_k=300, of="sum")

    def step(state: Any, gradient: Any) -> Any:
        updates, state = tx.update(gradient, state, params, units=1)
        return state, updates

    _, updates = jax.lax.scan(step, tx.init(params), jnp.ones((300, 1), jnp.bfloat16))
    assert updates.dtype == jnp.bfloat16
    assert float(updates[-1, 0]) == -1.0  # in bfloat16, 256 + 1 is 256


def test_two_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).parent / "jax_devices.py")],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch loaded: False" in done.stdout


def test_the_change_of_the_page() -> None:
    """docs/integrations/jax.md shows the change as a diff: both sides run, and agree."""
    before, after = run_diff(ROOT / "docs/integrations/jax.md")
    assert before["updates"] == after["updates"] == 3
    assert distance(after["params"], before["params"]) <= 1e-12
    assert distance(after["value"], before["value"]) <= 1e-12


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
