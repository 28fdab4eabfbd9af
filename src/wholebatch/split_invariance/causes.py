"""Say why a split makes another update: a factor, a share that is missing, other denominators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wholebatch.split_invariance.observed_run import Observed, Tensors

_NEAR = 1e-2
"""Shares and factors that are as near as this to a simple number are that number."""
_SPANNED = 1e-3
"""A gradient that is as near as this to a sum of others is that sum."""


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
    ("1/(K × ranks), as if divided by both twice", lambda k, r: 1 / (k * r)),
    ("2^K, as if doubled once per micro-batch", lambda k, r: 2.0**k),
    ("2^(K-1), as if doubled between micro-batches", lambda k, r: 2.0 ** (k - 1)),
]


def constant_factor(found: Tensors, right: Tensors) -> float | None:
    """Return the one number that the right gradients are multiplied by, or None."""
    if found.keys() != right.keys():
        return None
    sizes = {name: tensor.numel() for name, tensor in right.items()}
    a, b = _first(found, sizes), _first(right, sizes)
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


def name_shares(ranks: Sequence[Observed], right: Observed) -> list[str]:
    """Return what the gradients of the single backwards, on each rank, tell about an update.

    The first update that was made, and the right one, are written as weighted sums of them.
    """
    numbers = {len(observed.backwards) // max(1, observed.steps) for observed in ranks}
    if len(numbers) > 1 or numbers == {0}:
        return []
    [parts] = numbers
    backwards = [backward for observed in ranks for backward in observed.backwards[:parts]]
    reached = {name: sum(name in backward for backward in backwards) for name in right.judged}
    causes = [
        f"{name} gets a gradient from {number} of {len(backwards)} backwards, others from "
        f"{max(reached.values())}: what leads to it is kept from an earlier micro-batch (a cast, "
        "a cached tensor)"
        for name, number in reached.items()
        if 0 < number < max(reached.values())
    ]
    names = [name for name, number in reached.items() if number == len(backwards)]
    if causes or not names:
        return causes
    sizes = {name: backwards[0][name].numel() for name in names}
    table = torch.stack([_first(backward, sizes) for backward in backwards], dim=1)
    used = _weights(table, _first(ranks[0].judged, sizes))
    wanted = _weights(table, _first(right.judged, sizes))
    if wanted is None and right.draws:
        return ["random numbers are drawn in the forwards (dropout?), other ones by each split"]
    if wanted is None:
        return [
            "the right gradient is no sum of those of the micro-batches: a sample's gradient "
            "depends on its micro-batch or on those before (BatchNorm, a cache, a carried state)"
        ]
    if used is None:
        return ["the gradient is no sum of those of the micro-batches: it is changed on the way"]
    level = float(used.sum() / wanted.sum())
    cause = _name_weights(used.view(-1, parts), wanted.view(-1, parts))
    if abs(level - 1) > 0.1 and "missing" not in cause and "kept" not in cause:
        cause += f"; on average they count {level:.3g} times"
    return [cause]


def _first(tensors: Tensors, sizes: Mapping[str, int]) -> Tensor:
    """Return the tensors of the first update, one behind the other."""
    return torch.cat([tensors[name].flatten()[:size] for name, size in sizes.items()])


def _weights(table: Tensor, total: Tensor) -> Tensor | None:
    """Return the weights with which the columns of a table add up to `total`, or None."""
    weights: Tensor = torch.linalg.lstsq(table, total[:, None]).solution.squeeze(1)
    left = (table @ weights - total).norm()
    return weights if float(left) <= _SPANNED * float(total.norm()) else None


def _name_weights(used: Tensor, wanted: Tensor) -> str:
    """Name what differs between weights; a row for each rank, a column for each micro-batch."""
    share = used / wanted
    most = share.abs().max()
    gone = share.abs() < _NEAR * most
    parts, ranks = used.shape[1], used.shape[0]
    numbers = "; ".join(
        " ".join(f"{abs(each):.2f}" for each in row.tolist()) for row in share / most
    )
    shown = f" (shares, 1 for the largest{', a row for each rank' * (ranks > 1)}: {numbers})"
    if parts > 1 and ((share[:, :-1] / share[:, 1:] - 2).abs() < 10 * _NEAR).all():
        return f"each micro-batch doubles what was there before: 2^N{shown}"
    if gone.any():
        if gone.all(1).any():
            lost = [str(rank) for rank in range(ranks) if gone[rank].all()]
            return f"the gradient of rank {', '.join(lost)} is missing{shown}"
        if parts > 1 and gone[:, -1].any() and not gone[:, :-1].any():
            return (
                "the last micro-batch is missing"
                + (" on some ranks: it is not reduced" if ranks > 1 else "")
                + shown
            )
        if gone[:, :-1].all():
            return f"only the last micro-batch is kept{shown}"
        return f"micro-batches are missing{shown}"
    if parts > 1 and ranks > 1 and ((share[:, :-1] / share[:, -1:] - 1 / ranks).abs() < 0.1).all():
        return f"only the last micro-batch is reduced over the ranks{shown}"
    if float((share / most - 1).abs().max()) < _NEAR:
        return (
            "each micro-batch counts as it must in the first update: a later one is wrong, by what "
            "is carried there (a cast of old weights, a state, gradients that are not cleared)"
        )
    if float(used.std(correction=0) / used.mean().abs()) < _NEAR:
        within = share / share.mean(1, keepdim=True)
        if ranks > 1 and parts > 0 and float((within - 1).abs().max()) < _NEAR:
            return (
                "every rank counts the same, whatever it holds: a mean of the ranks' means. Divide "
                f"by the units (tokens, samples) of all ranks{shown}"
            )
        return (
            "every micro-batch counts the same, whatever it holds: a mean of means. Divide by the "
            f"units (tokens, samples) of the whole batch{shown}"
        )
    return (
        "micro-batches count with other weights than in the whole batch: the gradient is rescaled "
        f"or clipped between them, or each has a denominator of its own{shown}"
    )
