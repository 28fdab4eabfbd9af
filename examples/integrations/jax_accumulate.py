"""A language model in JAX: masked tokens, micro-batches of 8 sequences, jitted.

Run: python examples/integrations/jax_accumulate.py

The change from `jax.value_and_grad` (docs/integrations/jax.md):

    - return (losses * mask).sum() / mask.sum()
    - value, gradient = jax.value_and_grad(loss_fn)(params, batch)
    + from wholebatch.integrations.jax import accumulate
    + return (losses * mask).sum(), mask.sum()
    + value, gradient = accumulate(loss_fn, micro_batch=8)(params, batch)

It prints the loss of every update. Then it prints how far the gradient is from that of the
undivided batch: in the usual loop, which averages the gradients of micro-batches, and with
`accumulate`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from wholebatch.integrations.jax import accumulate

SEQUENCES, LENGTH, VOCABULARY, WIDTH = 30, 16, 64, 32


def loss_fn(params: Any, batch: Any) -> Any:
    """Return the sum over the tokens that count, and their number."""
    hidden = params["embedding"][batch["tokens"]]
    hidden = jnp.cumsum(hidden, axis=1) / jnp.arange(1, LENGTH + 1)[:, None]
    logits = jnp.tanh(hidden @ params["mix"]) @ params["embedding"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "embedding": 0.3 * jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "mix": 0.3 * jax.random.normal(keys[1], (WIDTH, WIDTH)),
    }
    tokens = jax.random.randint(keys[2], (SEQUENCES, LENGTH + 1), 0, VOCABULARY)
    lengths = jax.random.randint(keys[3], (SEQUENCES, 1), 2, LENGTH)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": jnp.arange(LENGTH) < lengths,
    }
    optimizer = optax.adamw(1e-2)
    gradient_of = accumulate(loss_fn, micro_batch=8)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradient = gradient_of(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value, gradient

    step = jax.jit(step, donate_argnums=(0, 1))
    state = optimizer.init(params)
    for update in range(1, 6):
        before = jax.tree.map(jnp.copy, params)
        params, state, value, gradient = step(params, state, batch)
        print(f"update {update}: loss {float(value):.4f}")

    @jax.jit
    def mean_gradient(batch: Any) -> Any:
        return jax.grad(lambda params: jnp.divide(*loss_fn(params, batch)))(before)

    def off(found: Any) -> float:
        whole = mean_gradient(batch)
        gap = optax.tree.norm(jax.tree.map(jnp.subtract, found, whole))
        return float(gap / optax.tree.norm(whole))

    starts = range(0, SEQUENCES, 8)
    micros = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 8], batch) for i in starts]
    gradients = [mean_gradient(micro) for micro in micros]
    usual = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *gradients)
    print(
        f"Shown: the gradient is off by {off(usual):.0%} in the usual loop, "
        f"by {off(gradient):.0e} with accumulate."
    )


if __name__ == "__main__":
    main()
