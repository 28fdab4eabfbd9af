"""Run by test_jax.py with two virtual devices: sharded batches, and one reduction per window."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from wholebatch.integrations.jax import accumulate

assert jax.device_count() == 2
print("torch loaded:", "torch" in sys.modules)  # before the tests' own helpers are imported

from tests.integrations.jax_problem import distance, loss_mean, loss_sum, problem  # noqa: E402

with jax.enable_x64(True):
    params, batch = problem()
    batch = jax.tree.map(lambda leaf: leaf[:10], batch)
    want = jax.value_and_grad(loss_mean)(params, batch)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    placed = jax.device_put(params, everywhere), jax.device_put(batch, rows)

    # The compiler partitions it: no row changes its device, whatever the remainder.
    for micro_batch in (4,):
        compiled = jax.jit(accumulate(loss_sum, micro_batch=micro_batch)).lower(*placed).compile()
        assert distance(compiled(*placed), want) <= 1e-12
    function = jax.jit(accumulate(loss_sum, micro_batch=2))
    text = function.lower(*placed).compile().as_text()
    for movement in ("all-gather(", "all-to-all(", "collective-permute("):
        assert movement not in text, movement

    # By hand, with another micro-batch remainder on each shard: one reduction, outside the loop.
    for micro_batch in (2, 8):
        sharded = jax.jit(
            jax.shard_map(
                accumulate(loss_sum, micro_batch=micro_batch, axis_name="data"),
                mesh=mesh,
                in_specs=(P(), P("data")),
                out_specs=(P(), P()),
            )
        )
        assert distance(sharded(*placed), want) <= 1e-12
        text = sharded.lower(*placed).compile().as_text()
        assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1, text
    uneven = jax.tree.map(lambda leaf: jnp.asarray(leaf), batch)
    uneven["mask"] = uneven["mask"].at[5:].set(False).at[5, 0].set(True)  # 1 token on device 1
    want = jax.value_and_grad(loss_mean)(params, uneven)
    assert distance(sharded(placed[0], jax.device_put(uneven, rows)), want) <= 1e-12
