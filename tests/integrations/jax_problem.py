"""The problem of the JAX tests: sequences with very different numbers of unmasked tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SAMPLES, LENGTH, CLASSES = 11, 5, 7


@contextmanager
def quick_float64() -> Iterator[None]:
    """float64, and quick compilation, which takes most of the time of these tests."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


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
