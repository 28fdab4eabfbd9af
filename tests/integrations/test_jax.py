"""JAX: `accumulate` gives the gradient of the undivided batch, on two devices too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from tests.integrations.blocks import assert_example_shows_the_change, run_diff  # noqa: E402
from tests.integrations.jax_problem import (  # noqa: E402
    LENGTH,
    SAMPLES,
    distance,
    loss_mean,
    loss_sum,
    problem,
    quick_float64,
    token_losses,
    whole_batch,
)
from wholebatch.errors import (  # noqa: E402
    LossError,
    OptionError,
    SplitError,
)
from wholebatch.integrations.jax import accumulate  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with quick_float64():
        yield


def optimized() -> None:
    """Compile in this test as users do: it is about memory."""
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("micro_batch", [4, 64])
def test_masked_tokens_are_the_undivided_batch(micro_batch: int) -> None:
    params, batch = problem()
    value, gradient = jax.jit(accumulate(loss_sum, micro_batch=micro_batch))(params, batch)
    want, want_gradient = whole_batch(params, batch)
    assert abs(float(value - want)) <= 1e-12 * abs(float(want))
    assert distance(gradient, want_gradient) <= 1e-12


def test_a_mean_with_its_units() -> None:
    params, batch = problem()
    batch["mask"][:9:3] = False  # the first micro-batch has no unit: its mean is 0/0
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


def test_memory_is_that_of_a_micro_batch() -> None:
    optimized()
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
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    call, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        call()


def test_two_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).parent / "jax_devices.py")],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # the text is that of the partitioned program
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


def test_micro_batches_that_come_one_by_one() -> None:
    """The second diff of the page: afterwards the gradient is that of all samples together."""
    before, after = run_diff(ROOT / "docs/integrations/jax.md", 1)

    def mean(params: Any) -> Any:
        return jnp.mean((after["data"]["x"] @ params - after["data"]["y"]) ** 2)

    want = -0.1 * jax.grad(mean)(jnp.zeros(4))
    assert distance(after["params"], want) <= 1e-6  # the page computes in float32
    assert distance(before["params"], want) > 0.05


def test_the_example() -> None:
    assert_example_shows_the_change("jax_accumulate")
