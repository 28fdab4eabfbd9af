"""JAX with optax: `accumulate` beside optax.microbatch, `multi_steps` beside optax.MultiSteps."""

from __future__ import annotations

import os
import pickle
from functools import partial
from typing import Any, Literal

os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.row import DOCUMENTED, Row
from wholebatch.errors import LossError
from wholebatch.integrations.jax import accumulate, multi_steps

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


def by_stream(case: str, kind: Literal["own", "ours"]) -> Any:
    """Micro-batches one by one, through an optax transformation."""
    params, data = problem(case)
    start, inner = params, inner_of(case)
    tx: Any = (
        multi_steps(inner, every_k=STEPS)
        if kind == "ours"
        else optax.MultiSteps(inner, every_k_schedule=STEPS, accumulator_dtype=jnp.float64)
    )

    @jax.jit
    def step(params: Any, state: Any, micro: Any, last: Any) -> Any:
        gradient = jax.grad(loss_mean)(params, micro)
        extra = {"units": micro["kept"].sum(), "last": last} if kind == "ours" else {}
        updates, state = tx.update(gradient, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    micros = cut(data, SIZES[case])
    for index, micro in enumerate(micros):
        params, state = step(params, state, micro, index + 1 == len(micros))
    return moved(params, start)


def own_microbatch(params: Any, batch: Any) -> Any:
    """optax.microbatch with its mean of gradients: micro-batches of two, which must divide."""
    return optax.microbatching.microbatch(
        jax.grad(loss_mean), 1, 2, optax.microbatching.AccumulationType.MEAN
    )(params, batch)


def distance(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# The cases beside the split. A pure function has no BatchNorm statistics, and `accumulate` no state
# to resume.


def mean_squared(params: Any, micro: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(micro["x"] @ params["in"]) @ params["out"] - micro["y"]))


def compares(params: Any, micro: Any) -> Any:
    z = jnp.tanh(micro["x"] @ params["in"]) @ params["out"]
    scores = z @ z.T
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - jnp.diag(scores))


def plain_problem(samples: int, dtype: Any = np.float64) -> tuple[Any, Any]:
    random = np.random.default_rng(2)
    params = {"in": random.normal(size=(WIDTH, 5)), "out": random.normal(size=(5, 3))}
    batch = {"x": random.normal(size=(samples, WIDTH)), "y": random.normal(size=(samples, 3))}
    made: tuple[Any, Any] = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (params, batch))
    return made


def streamed(
    params: Any, micros: Any, steps: int, kind: str, loss: Any = mean_squared, saved_at: int = -1
) -> Any:
    """Train on micro-batches one by one; at `saved_at` the state goes through a file's bytes."""
    inner = optax.sgd(0.1)
    tx: Any = (
        multi_steps(inner, every_k=steps)
        if kind == "ours"
        else optax.MultiSteps(inner, every_k_schedule=steps, accumulator_dtype=jnp.float64)
    )

    @jax.jit
    def step(params: Any, state: Any, micro: Any) -> Any:
        gradient = jax.grad(loss)(params, micro)
        extra = {"units": len(micro["x"])} if kind == "ours" else {}
        updates, state = tx.update(gradient, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for index, micro in enumerate(micros):
        if index == saved_at:
            params, state = pickle.loads(pickle.dumps(jax.device_get((params, state))))
        params, state = step(params, state, micro)
    return params


def split(params: Any, wholes: Any, kind: str, loss: Any = mean_squared) -> Any:
    """Train on undivided batches, each split into micro-batches of two inside."""
    if kind == "ours":
        found = accumulate(loss, micro_batch=2, units="samples")
        found(params, wholes[0])  # tests the loss: under jit there are no values to test with
        gradient_of: Any = lambda params, batch: found(params, batch)[1]  # noqa: E731
    else:
        mean = optax.microbatching.AccumulationType.MEAN
        gradient_of = optax.microbatching.microbatch(jax.grad(loss), 1, 2, mean)
    # Both give a gradient and leave the update to the caller, who guards it.
    inner = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=10)
    state = inner.init(params)
    for batch in wholes:
        updates, state = inner.update(jax.jit(gradient_of)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params


def error(got: Any, want: Any, start: Any) -> float | str:
    found = distance(moved(got, start), moved(want, start))
    return found if found == found else "NaN"


def law_rows(way: str) -> list[Row]:
    """The rows of one of optax's ways of accumulating."""
    library, stream = f"optax {optax.__version__}, {way}", way == "MultiSteps"
    start, data = plain_problem(16)
    micros, wholes = cut(data, (2,) * 8), cut(data, (8, 8))
    whole = streamed(start, wholes, 1, "own")

    def run(kind: str, micros: Any, wholes: Any, loss: Any = mean_squared) -> Any:
        if stream:
            return streamed(start, micros, STEPS, kind, loss)
        return split(start, wholes, kind, loss)

    rows = [_in_16_bit(library, stream), _contrastive(library, stream, run)]

    spoiled = {**data, "x": data["x"].at[11].set(jnp.nan)}
    parts = (cut(spoiled, (2,) * 8), cut(spoiled, (8, 8)))
    first = streamed(start, wholes[:1], 1, "own")
    own, ours = (error(run(kind, *parts), first, start) for kind in ("own", "ours"))
    note = "no update, counted in state.skipped" if stream else "both in optax.apply_if_finite"
    rows.append(Row(library, "NaN", own, ours, "float64", note))
    if stream:
        own, ours = (
            error(streamed(start, micros, STEPS, kind, saved_at=6), whole, start)
            for kind in ("own", "ours")
        )
        note = "state saved after 6 of 8 equal micro-batches, in the second window"
        rows.append(Row(library, "resume", own, ours, "float64", note))
    return rows


def _contrastive(library: str, stream: bool, run: Any) -> Row:
    """A plain loss that compares all samples with each other."""
    start, data = plain_problem(16)
    micros, wholes = cut(data, (2,) * 8), cut(data, (8, 8))
    whole = streamed(start, wholes, 1, "own", compares)
    own = error(run("own", micros, wholes, compares), whole, start)
    if not stream:
        try:
            ours: float | str = error(run("ours", micros, wholes, compares), whole, start)
        except LossError:
            ours = "refused"
        return Row(library, "contrastive", own, ours, "float64")
    off = float(error(run("ours", micros, wholes, compares), whole, start))
    note = f"{off:.0%} off in silence: a transformation of gradients never sees the loss"
    return Row(library, "contrastive", own, DOCUMENTED if off > 1e-12 else off, "float64", note)


def _in_16_bit(library: str, stream: bool) -> Row:
    """The gradient of 256 micro-batches in bf16, beside their sum in float64."""
    many = 256
    params, data = plain_problem(2 * many, jnp.bfloat16)
    gradient_of = jax.jit(jax.grad(mean_squared))
    micros = cut(data, (2,) * many)
    if not stream:  # both take every n-th row for a micro-batch
        micros = [jax.tree.map(lambda leaf, at=at: leaf[at::many], data) for at in range(many)]
    truth = sum(_flat(gradient_of(params, micro)) for micro in micros) / many
    found = []
    for kind in ("own", "ours"):
        if stream:
            tx: Any = (
                multi_steps(optax.identity(), every_k=many)
                if kind == "ours"
                else optax.MultiSteps(optax.identity(), every_k_schedule=many)
            )
            state = tx.init(params)
            update = jax.jit(tx.update)
            for micro in micros:
                gradient = gradient_of(params, micro)
                extra = {"units": 2} if kind == "ours" else {}
                gradient, state = update(gradient, state, params, **extra)
        elif kind == "ours":
            wide = accumulate(mean_squared, micro_batch=2, units="samples")
            gradient = wide(params, data)[1]
        else:
            mean = optax.microbatching.AccumulationType.MEAN
            microbatch = optax.microbatching.microbatch(jax.grad(mean_squared), 1, 2, mean)
            gradient = microbatch(params, data)
        found.append(distance(_flat(gradient), truth))
    note = "the gradient, beside its sum in float64; both give it in bf16"
    return Row(library, "bf16 × 256", found[0], found[1], "bf16 result", note)


def _flat(tree: Any) -> Any:
    return np.concatenate([np.asarray(tree[name], np.float64).ravel() for name in sorted(tree)])


def rows() -> list[Row]:
    found = []
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
        two = case == "two processes"
        spread = place if two else lambda batch: batch
        exact = by_gradient(
            case, lambda p, b, two=two: (sharded if two else ours_of)(p, b)[1], spread
        )
        even = case != "uneven"
        own = by_gradient(case, own_microbatch, spread) if even else None
        note = "" if even else "micro-batches of one size only"
        if two:
            note = "two devices of one process"
        found.append(
            Row(
                f"optax {optax.__version__}, microbatch",
                case,
                None if own is None else distance(own, whole),
                distance(exact, whole),
                "float64",
                note,
            )
        )
        if not two:
            found.append(
                Row(
                    f"optax {optax.__version__}, MultiSteps",
                    case,
                    distance(by_stream(case, "own"), whole),
                    distance(by_stream(case, "ours"), whole),
                    "float64",
                )
            )
    found += [*law_rows("MultiSteps"), *law_rows("microbatch")]
    return sorted(found, key=lambda row: row.library)
