"""JAX with optax: `accumulate` beside optax.microbatch and optax.MultiSteps."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.row import Row
from wholebatch.integrations.jax import accumulate

LENGTH, WIDTH, CLASSES, STEPS, RATE = 6, 4, 7, 4, 0.5
# The micro-batches of an epoch by their sizes; a window has STEPS of them.
SIZES = {
    "equal": (2,) * 8,
    "uneven": (3, 1, 2, 4, 1, 5, 2, 3),
    "short tail": (2,) * 10,
    "masked tokens": (2,) * 8,
    "clipped": (2,) * 8,
    "two processes": (2,) * 8,
}
MASKED = ("masked tokens", "clipped", "two processes")


def problem(case: str) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    samples = sum(SIZES[case])
    lengths = random.integers(1, LENGTH + 1, size=(samples, 1))
    kept = np.arange(LENGTH) < (lengths if case in MASKED else LENGTH)
    params = {
        "in": random.normal(size=(WIDTH, 5)),
        "out": random.normal(size=(5, CLASSES)),
    }
    batch = {
        "x": random.normal(size=(samples, LENGTH, WIDTH)),
        "y": random.integers(0, CLASSES, size=(samples, LENGTH)),
        "kept": np.broadcast_to(kept, (samples, LENGTH)),
    }
    return params, batch


def loss_sum(params: Any, batch: Any) -> Any:
    logits = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return (losses * batch["kept"]).sum(), batch["kept"].sum()


def loss_mean(params: Any, batch: Any) -> Any:
    total, units = loss_sum(params, batch)
    return total / units


def cut(batch: Any, sizes: tuple[int, ...]) -> list[Any]:
    ends = np.cumsum(sizes)
    return [
        jax.tree.map(lambda leaf, a=end - size, b=end: leaf[a:b], batch)
        for size, end in zip(sizes, ends, strict=True)
    ]


def inner_of(case: str) -> Any:
    clip = [optax.clip_by_global_norm(0.02)] if case == "clipped" else []
    return optax.chain(*clip, optax.sgd(RATE))


def moved(got: Any, start: Any) -> Any:
    return np.concatenate([(np.asarray(got[name]) - start[name]).ravel() for name in sorted(start)])


def windows_of(case: str) -> tuple[int, ...]:
    sizes = SIZES[case]
    return tuple(sum(sizes[at : at + STEPS]) for at in range(0, len(sizes), STEPS))


def by_gradient(case: str, gradient_of: Any, placed: Any = lambda batch: batch) -> Any:
    """One update per undivided batch, from a function that gives its gradient."""
    params, data = problem(case)
    start, inner = params, inner_of(case)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = inner.update(gradient_of(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = inner.init(params)
    for batch in cut(data, windows_of(case)):
        params, state = step(params, state, placed(batch))
    return moved(params, start)


def by_multi_steps(case: str) -> Any:
    """Return the parameters after `optax.MultiSteps`, which gets micro-batches one by one."""
    params, data = problem(case)
    start = params
    tx: Any = optax.MultiSteps(
        inner_of(case), every_k_schedule=STEPS, accumulator_dtype=jnp.float64
    )

    @jax.jit
    def step(params: Any, state: Any, micro: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_mean)(params, micro), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for micro in cut(data, SIZES[case]):
        params, state = step(params, state, micro)
    return moved(params, start)


def own_microbatch(params: Any, batch: Any) -> Any:
    """optax.microbatch with its mean of gradients: micro-batches of two, which must divide."""
    return optax.microbatching.microbatch(
        jax.grad(loss_mean), 1, 2, optax.microbatching.AccumulationType.MEAN
    )(params, batch)


def distance(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def rows() -> list[Row]:
    """Return the rows of optax's two accumulations, both beside `accumulate`."""
    rows = []
    ours_of = accumulate(loss_sum, micro_batch=3)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        accumulate(loss_sum, micro_batch=3, axis_name="data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=(P(), P()),
    )
    place = partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    for case in SIZES:
        whole = by_gradient(case, jax.grad(loss_mean))
        two = case == "two processes"  # two devices of one process
        spread = place if two else lambda batch: batch
        gradient_of = sharded if two else ours_of
        exact = by_gradient(case, lambda p, b, f=gradient_of: f(p, b)[1], spread)
        ours = distance(exact, whole)
        own = None  # its micro-batches have one size
        if case != "uneven":
            own = distance(by_gradient(case, own_microbatch, spread), whole)
        rows.append(Row("optax.microbatch", optax.__version__, case, own, ours))
        if not two:
            own = distance(by_multi_steps(case), whole)
            rows.append(Row("optax.MultiSteps", optax.__version__, case, own, ours))
    return rows
