"""A language model's loss over masked tokens, from micro-batches of 8 sequences, jitted.

Run: python examples/integrations/jax_accumulate.py
It prints the loss of every update, and how far the last gradient is from the undivided batch's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from wholebatch.integrations.jax import accumulate

SEQUENCES, LENGTH, VOCABULARY, WIDTH = 30, 16, 64, 32


def loss_fn(params: Any, batch: Any) -> Any:
    """The sum over the tokens that count, and how many they are."""
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

    def mean(params: Any) -> Any:
        total, units = loss_fn(params, batch)
        return total / units

    whole = optax.tree.norm(jax.grad(mean)(before))
    gap = optax.tree.norm(jax.tree.map(jnp.subtract, jax.grad(mean)(before), gradient))
    print(f"relative distance to the undivided batch's gradient: {float(gap / whole):.1e}")


if __name__ == "__main__":
    main()
