"""JAX: `accumulate` and `multi_steps` are the undivided batch, on two devices too."""

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
import optax  # noqa: E402

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
    WindowError,
)
from wholebatch.integrations.jax import (  # noqa: E402
    accumulate,
    multi_steps,
)

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
    optimized()
    params, batch = problem()
    gradient_of = accumulate(loss_sum, micro_batch=2)

    def step(params: Any, batch: Any) -> Any:
        value, gradient = gradient_of(params, batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    donating = jax.jit(step, donate_argnums=0).lower(params, batch).compile()
    sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert donating.memory_analysis().alias_size_in_bytes == sizes


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


def contrastive(params: Any, batch: Any) -> Any:
    z = batch["x"][:, 0] @ params["in"]
    scores = z @ z.T
    return jnp.sum(jax.nn.logsumexp(scores, axis=1) - jnp.diag(scores)), len(z)


def centred(params: Any, batch: Any) -> Any:
    return loss_sum(params, {**batch, "x": batch["x"] - batch["x"].mean(0)})


def by_their_mean(params: Any, batch: Any) -> Any:
    losses = jnp.square(batch["x"] @ params["in"]).sum((1, 2))
    return (losses / jax.lax.stop_gradient(losses.mean())).sum(), len(losses)


@jax.custom_vjp
def normalised_back(x: Any) -> Any:
    return x


normalised_back.defvjp(lambda x: (x, None), lambda _, g: (g / (1e-3 + jnp.linalg.norm(g)),))


def with_another_gradient(params: Any, batch: Any) -> Any:
    z = normalised_back(batch["x"][:, 0] @ params["in"])
    return jnp.square(z).sum(), len(z)


COUPLED: dict[str, tuple[Any, Any]] = {
    "losses divided by their mean, which is constant": (by_their_mean, None),
    "a gradient of its own": (with_another_gradient, None),
    "a statistic of the batch": (centred, None),
    "other units": (loss_mean, "samples"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_does_not_add_up_is_refused(name: str) -> None:
    loss, units = COUPLED[name]
    call = accumulate(loss, micro_batch=3, units=units)
    with pytest.raises(LossError, match=r"compares samples .* audit=False turns this test off"):
        call(*problem())
    if loss is by_their_mean:
        accumulate(loss, micro_batch=SAMPLES, units=units)(*problem())  # not split
        accumulate(loss, micro_batch=3, units=units, audit=False)(*problem())


def test_a_mask_of_the_first_real_batch_is_in_the_test() -> None:
    """Labels of -1 do not count, but the loss is a mean over all places."""

    def loss(params: Any, batch: Any) -> Any:
        losses = jnp.square(batch["x"] @ params["in"]).sum(-1)
        counts = batch["y"] != -1
        return (losses * counts).mean() * counts.sum(), counts.sum()

    params, batch = problem()
    accumulate(loss, micro_batch=3)(params, batch)  # nothing is masked: both are the same mean
    batch["y"] = np.where(np.arange(LENGTH) < np.arange(SAMPLES)[:, None], -1, batch["y"])
    with pytest.raises(LossError, match="compares samples"):
        accumulate(loss, micro_batch=3)(params, batch)


def test_units_that_are_trained_are_refused() -> None:
    def loss(params: Any, batch: Any, constant: bool = False) -> Any:
        z = batch["x"][:, 0] @ params["in"]
        weights = jax.nn.sigmoid(z[:, 0])
        weights = jax.lax.stop_gradient(weights) if constant else weights
        return (weights * jnp.square(z).sum(1)).sum(), weights.sum()

    call = accumulate(loss, micro_batch=3)
    with pytest.raises(LossError, match=r"units depend on the parameters.*stop_gradient"):
        call(*problem())
    constant = accumulate(lambda p, b: loss(p, b, constant=True), micro_batch=3)(*problem())
    whole = jax.value_and_grad(lambda p, b: jnp.divide(*loss(p, b, constant=True)))(*problem())
    for ours, theirs in zip(*map(jax.tree.leaves, (constant, whole)), strict=True):
        assert jnp.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [loss_sum, contrastive], ids=["plain", "contrastive"])
def test_dropout_is_told_from_comparing(loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    def dropped(params: Any, micro: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, micro["x"].shape)
        return loss(params, {**micro, "x": micro["x"] * kept})

    call = accumulate(dropped, micro_batch=4)
    if loss is contrastive:
        with pytest.raises(LossError, match="compares samples"):
            call(*problem())
    else:
        call(*problem())
    assert not caplog.records


def test_under_jit_it_is_logged_once_that_nothing_was_tested(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = accumulate(contrastive, micro_batch=4)
    for _ in range(2):
        jax.eval_shape(call, *problem())
    (record,) = caplog.records
    assert "was not tested to add up over micro-batches" in record.message
    assert "under jax.jit there are no values. Call the function" in record.message
    with pytest.raises(LossError, match="compares samples"):
        call(*problem())


def test_after_a_test_outside_jit_nothing_is_logged_under_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = accumulate(loss_sum, micro_batch=4)
    call(*problem())
    jax.eval_shape(call, *problem())
    jax.eval_shape(accumulate(contrastive, micro_batch=4, audit=False), *problem())
    assert not caplog.records


def test_a_traced_key_is_no_value_either(caplog: pytest.LogCaptureFixture) -> None:
    @jax.jit
    def value(key: Any) -> Any:
        def dropped(params: Any, micro: Any) -> Any:
            kept = jax.random.bernoulli(key, 0.5, micro["x"].shape)
            return loss_sum(params, {**micro, "x": micro["x"] * kept})

        return accumulate(dropped, micro_batch=4)(*problem())[0]

    jax.eval_shape(value, jax.random.key(0))
    assert "under jax.jit there are no values" in caplog.text


def test_a_test_that_is_not_possible_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.log(-jnp.square(batch["x"])).sum() * params["in"].sum(), len(batch["x"])

    accumulate(loss, micro_batch=4)(*problem())
    assert "was not tested to add up over micro-batches" in caplog.text
    assert "the loss of the first 8 samples is not finite" in caplog.text


def test_units_of_a_16_bit_mean_are_not_rounded() -> None:
    """1 unit and 1001: of 1001, bfloat16 makes 1000, and of a sum of 1002 the same."""

    def loss(w: Any, batch: Any) -> Any:
        return jnp.sum(batch["x"] * w)  # the mean of a micro-batch of one sample

    batch = {"x": jnp.asarray([[1.0], [2.0]], jnp.bfloat16), "units": jnp.asarray([1, 1001])}
    value, gradient = jax.jit(
        accumulate(loss, micro_batch=1, units=lambda batch: batch["units"].sum(), audit=False)
    )(jnp.ones(1, jnp.bfloat16), batch)
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(2003 / 1002, rel=1e-6)
    assert float(gradient[0]) == float(jnp.asarray(2003 / 1002, jnp.bfloat16))


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


def test_the_example() -> None:
    assert_example_shows_the_change("jax_accumulate")
