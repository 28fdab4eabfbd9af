"""Run by test_jax.py with two virtual devices: sharded batches, and one reduction per window."""

from __future__ import annotations

import sys

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from wholebatch.integrations.jax import accumulate

assert jax.device_count() == 2
print("torch loaded:", "torch" in sys.modules)  # before the tests' own helpers are imported

from tests.integrations.jax_problem import distance, loss_sum, problem, whole_batch  # noqa: E402

with jax.enable_x64(True):
    params, batch = problem()
    batch = jax.tree.map(lambda leaf: leaf[:10], batch)
    want = whole_batch(params, batch)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    placed = jax.device_put(params, everywhere), jax.device_put(batch, rows)

    # The compiler partitions it: no row changes its device, whatever the remainder.
    compiled = jax.jit(accumulate(loss_sum, micro_batch=4)).lower(*placed).compile()
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
        compiled = sharded.lower(*placed).compile()
        assert distance(compiled(*placed), want) <= 1e-12
        text = compiled.as_text()
        assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1, text
    uneven = {**batch, "mask": batch["mask"].copy()}
    uneven["mask"][5:] = False
    uneven["mask"][5, 0] = True  # 1 token on device 1
    want = whole_batch(params, uneven)
    assert distance(compiled(placed[0], jax.device_put(uneven, rows)), want) <= 1e-12
