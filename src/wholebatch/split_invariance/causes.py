"""Ways to cut a batch, and the factors by which a split multiplies its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from wholebatch.split_invariance.observed_run import Tensors

_NEAR = 1e-2
"""Shares and factors that are as near as this to a simple number are that number."""


class Layout(NamedTuple):
    """A way to cut the batch: micro-batches of so many samples, on so many ranks."""

    micro_batch: int
    ranks: int

    def __str__(self) -> str:
        return f"micro_batch={self.micro_batch} on {self.ranks} rank{'s' * (self.ranks > 1)}"

    def parts(self, samples: int) -> int:
        """Return the micro-batches of a rank."""
        return max(1, -(-samples // (self.micro_batch * self.ranks)))


_FACTORS: list[tuple[str, Callable[[int, int], float]]] = [
    ("K, the number of micro-batches of a rank, as if nothing divided by it", lambda k, r: k),
    ("1/K, as if divided by the number of micro-batches twice", lambda k, r: 1 / k),
    ("the number of ranks, as if summed and not averaged over them", lambda k, r: r),
    ("1/ranks, as if averaged over the ranks twice", lambda k, r: 1 / r),
    ("K × ranks, as if divided by neither", lambda k, r: k * r),
    ("2^(K-1), as if doubled between micro-batches", lambda k, r: 2.0 ** (k - 1)),
]


def constant_factor(changed: Tensors, right: Tensors) -> float | None:
    """Return the one number that the right gradients are multiplied by, or None."""
    if changed.keys() != right.keys():
        return None
    sizes = {name: tensor.numel() for name, tensor in right.items()}
    a, b = _first(changed, sizes), _first(right, sizes)
    factor = float((a * b).sum() / (b * b).sum())
    left = float((a - factor * b).norm() / (factor * b).norm())
    return factor if left < _NEAR * abs(factor - 1) else None


def name_factors(factors: Mapping[Layout, float], samples: int) -> str:
    """Return what the constant factors of some splits are."""
    named = [
        name
        for name, of in _FACTORS
        if all(
            abs(of(layout.parts(samples), layout.ranks) / factor - 1) < _NEAR
            for layout, factor in factors.items()
        )
    ]
    numbers = ", ".join(f"{factor:.4g} with {layout}" for layout, factor in factors.items())
    several = any(layout.ranks > 1 for layout in factors)
    what = " or ".join(named[: 1 + several])
    return f"the whole gradient is multiplied by {what or 'one number'} ({numbers})"


def _first(tensors: Tensors, sizes: Mapping[str, int]) -> Tensor:
    """Return the tensors of the first update, one behind the other."""
    return torch.cat([tensors[name].flatten()[:size] for name, size in sizes.items()])
