"""JAX: 16-bit parameters in micro-batches are as near to float64 as the undivided batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import export  # noqa: E402

from tests.integrations.jax_problem import distance, quick_float64  # noqa: E402
from wholebatch.integrations.jax import accumulate  # noqa: E402

SAMPLES, WIDTH = 64, 8


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with quick_float64():
        yield


# One layer each: what comes before the gradient's own product is then exact, and rounds nothing.
def dense(w: Any, x: Any) -> Any:
    return x @ w["kernel"] + w["bias"]


def einsum(w: Any, x: Any) -> Any:
    return jnp.einsum("bi,ji->bj", x, w["kernel"])  # a call inside the call


def tied(w: Any, x: Any) -> Any:
    return x @ w["kernel"] + x @ w["kernel"].T


def checkpointed(w: Any, x: Any) -> Any:
    return jax.checkpoint(dense)(w, x)


def scanned(w: Any, x: Any) -> Any:
    layers = jnp.stack([w["kernel"], w["kernel"].T])
    return jax.lax.scan(lambda carry, layer: (carry, x @ layer), 0, layers)[1]


def convolved(w: Any, x: Any) -> Any:
    kernel = w["kernel"][:1, None, :3]
    return jax.lax.conv_general_dilated(x[:, None], kernel, (1,), "SAME")[:, 0]


def problem(seed: int = 0) -> tuple[Any, Any]:
    """The gradients of samples cancel to a tenth: what is rounded in each of them shows."""
    random = np.random.default_rng(seed)
    shapes = {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)}
    params = {
        name: jnp.asarray(random.normal(size=shape) / 3, jnp.bfloat16)
        for name, shape in shapes.items()
    }
    x = random.normal(size=(SAMPLES // 2, WIDTH))
    weight = random.normal(size=(SAMPLES // 2, WIDTH))
    batch = {
        "x": jnp.asarray(np.concatenate([x, x]), jnp.bfloat16),
        "weight": jnp.asarray(
            np.concatenate([weight, 0.1 * random.normal(size=weight.shape) - weight]), jnp.bfloat16
        ),
    }
    return params, batch


MODELS = (dense, einsum, tied, checkpointed, scanned, convolved)


def loss_of(model: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Any, batch: Any) -> Any:
        made = model(params, batch["x"])
        wide = jnp.promote_types(made.dtype, jnp.float32)
        return jnp.sum(made.astype(wide) * batch["weight"].astype(wide)), len(batch["x"])

    return loss


def whole(model: Callable[..., Any], params: Any, batch: Any) -> Any:
    def mean(params: Any, batch: Any) -> Any:
        total, units = loss_of(model)(params, batch)
        return total / units

    return jax.grad(mean)(params, batch)


@jax.jit  # all models in one: compiling is what takes the time
def undivided(params: Any, batch: Any) -> Any:
    return [whole(model, params, batch) for model in MODELS]


@jax.jit
def divided(params: Any, batch: Any) -> Any:
    return [
        [accumulate(loss_of(model), micro_batch=size)(params, batch)[1] for size in (1, 6)]
        for model in MODELS
    ]


@jax.jit
def by_sample(params: Any, batch: Any) -> Any:
    """Every sample's gradient, rounded."""
    samples = jax.tree.map(lambda leaf: leaf[:, None], batch)
    return [jax.lax.map(lambda one, m=model: whole(m, params, one), samples) for model in MODELS]


def test_no_further_from_float64_than_the_whole_batch() -> None:
    params, batch = problem()
    exact = undivided(
        *jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, batch)),
    )
    narrow, got = undivided(params, batch), divided(params, batch)
    rounded = by_sample(params, batch)
    for i, model in enumerate(MODELS):
        own = distance(narrow[i]["kernel"], exact[i]["kernel"])
        for gradient in got[i]:
            assert gradient["kernel"].dtype == gradient["bias"].dtype == jnp.bfloat16
            assert distance(gradient["kernel"], exact[i]["kernel"]) <= 1.25 * own, model
            assert distance(gradient, exact[i]) <= 1.25 * distance(narrow[i], exact[i]), model
        # What it is held against: these roundings do not cancel, however the sum is made.
        mean = np.asarray(rounded[i]["kernel"], np.float64).mean(axis=0)
        assert distance(mean, exact[i]["kernel"]) > 10 * own, model


def test_outputs_that_are_needed_rounded_too_are_computed_once() -> None:
    def loss(w: Any, batch: Any) -> Any:
        made = batch["x"] @ w["kernel"]
        return (jnp.sum(made.astype(jnp.float32)), len(made)), made

    params, batch = problem()
    products = str(jax.make_jaxpr(accumulate(loss, micro_batch=64, has_aux=True))(params, batch))
    # One forward; one for the gradient, which has a form for the CPU and one for all others.
    assert products.count("dot_general[") == 3


def test_a_gpu_multiplies_16_bit_matrices() -> None:
    """Casting its operands would be as exact, at a fraction of the speed."""
    function = jax.jit(accumulate(loss_of(dense), micro_batch=64))
    text = str(export.export(function, platforms=["cuda"])(*problem()).mlir_module())
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    made = [line.split(" : ", 1)[1].split(" loc")[0] for line in products]
    assert made == [
        "(tensor<64x8xbf16>, tensor<8x8xbf16>) -> tensor<64x8xbf16>",
        "(tensor<64x8xbf16>, tensor<64x8xbf16>) -> tensor<8x8xf32>",
    ]


def test_wider_parameters_are_not_touched() -> None:
    params, batch = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), problem())
    made = str(jax.make_jaxpr(accumulate(loss_of(dense), micro_batch=64))(params, batch))
    assert "platform_index" not in made
    assert "bf16" not in made


def test_units_of_a_16_bit_mean_are_not_rounded() -> None:
    """1 unit and 1001: of 1001, bfloat16 makes 1000, and of a sum of 1002 the same."""

    def loss(w: Any, batch: Any) -> Any:
        return jnp.sum(batch["x"] * w)  # the mean of a micro-batch of one sample, so no look

    batch = {"x": jnp.asarray([[1.0], [2.0]], jnp.bfloat16), "units": jnp.asarray([1, 1001])}
    value, gradient = jax.jit(
        accumulate(loss, micro_batch=1, units=lambda batch: batch["units"].sum(), audit=False)
    )(jnp.ones(1, jnp.bfloat16), batch)
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(2003 / 1002, rel=1e-6)
    assert float(gradient[0]) == float(jnp.asarray(2003 / 1002, jnp.bfloat16))
