"""Batch arithmetic, and rules for a changed batch size. Nothing here imports torch.

The arithmetic is exact: global batch = micro-batch × steps × ranks, even with a remainder.

The rules for learning rate and warm-up are rules of thumb with a source, not laws: docs/scaling.md
has the tables of their tests.

- linear: Goyal et al. 2017 (arXiv:1706.02677), SGD with momentum.
- sqrt: Krizhevsky 2014 (arXiv:1404.5997); for Adam Malladi et al. 2022 (arXiv:2205.10287).
- warm-up over the same samples: Goyal et al.; over the same updates (epochs in proportion to the
  batch): You et al. 2019 (arXiv:1901.08256, 1904.00962).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from wholebatch.errors import OptionError


def share_of(samples: int, *, rank: int, ranks: int) -> slice:
    """Return a rank's samples of a batch: contiguous, and no rank has two more than another.

    The first rank, which writes the metrics, always has one.

    >>> [share_of(10, rank=rank, ranks=4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 8, None), slice(8, 10, None)]
    """
    return slice(-(-samples * rank // ranks), -(-samples * (rank + 1) // ranks))


@dataclass(frozen=True)
class Arithmetic:
    """The division of one global batch: each rank's share and each micro-batch's size.

    >>> batch = solve(batch_size=100, micro_batch=8, ranks=3)
    >>> batch.steps, batch.shares
    (5, (34, 33, 33))
    >>> batch.micro_batches[0], batch.micro_batches[2]
    ((8, 8, 8, 8, 2), (8, 8, 8, 8, 1))
    >>> print(batch)
    (8 × 4 + 2) × 1 rank + (8 × 4 + 1) × 2 ranks = 100
    """

    batch_size: int
    micro_batch: int
    ranks: int

    @property
    def shares(self) -> tuple[int, ...]:
        """Return the samples of each rank; their sum is the global batch."""
        slices = (share_of(self.batch_size, rank=r, ranks=self.ranks) for r in range(self.ranks))
        return tuple(part.stop - part.start for part in slices)

    @property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """Return the samples of each micro-batch of each rank: full ones, then the rest."""
        size, full_and_rest = self.micro_batch, (divmod(n, self.micro_batch) for n in self.shares)
        return tuple((size,) * full + (rest,) * bool(rest) for full, rest in full_and_rest)

    @property
    def steps(self) -> int:
        """Return the most micro-batches of any rank."""
        most = -(-self.batch_size // self.ranks)  # The share of the first rank.
        return -(-most // self.micro_batch)

    def __str__(self) -> str:
        """Return the sizes by rank as a sum that a person can check."""
        alike = Counter(self.micro_batches)  # In the order of the first rank of each kind.
        terms = []
        for sizes, ranks in alike.items():
            runs = [(size, len(list(same))) for size, same in groupby(sizes or (0,))]
            inner = " + ".join(
                f"{size}" if count == 1 and index else f"{size} × {count}"
                for index, (size, count) in enumerate(runs)
            )
            inner = f"({inner})" if len(runs) > 1 else inner
            terms.append(f"{inner} × {ranks} rank{'' if ranks == 1 else 's'}")
        return f"{' + '.join(terms)} = {self.batch_size}"

    @property
    def line(self) -> str:
        """Return the arithmetic as `train` and `plan` show it."""
        return f"{self} samples an update (micro-batch × steps × ranks)"

    def as_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        names = ("batch_size", "micro_batch", "steps", "ranks", "shares", "micro_batches")
        return {**{name: getattr(self, name) for name in names}, "formula": str(self)}


MOST = 1_000_000
"""The most ranks, and micro-batches of one update; longer lists would fill the memory."""


def solve(
    *,
    batch_size: int | None = None,
    micro_batch: int | None = None,
    steps: int | None = None,
    ranks: int | None = None,
) -> Arithmetic:
    """Compute one of the four from the others; `ranks` is 1 if only two of the others are given.

    The result is the smallest possible: the fewest steps that cover the global batch, or the
    smallest micro-batch or the fewest ranks that need no more steps.

    >>> solve(micro_batch=8, steps=4, ranks=2).batch_size
    64
    >>> solve(batch_size=64, steps=4, ranks=2).micro_batch
    8
    >>> solve(batch_size=64, micro_batch=8, steps=4).ranks
    2
    >>> solve(batch_size=64, micro_batch=8).steps
    8
    """
    whole = bool(batch_size and micro_batch and steps)
    if ranks is None and batch_size and micro_batch and steps:
        arithmetic = Arithmetic(batch_size, micro_batch, -(-batch_size // (micro_batch * steps)))
    elif batch_size and micro_batch:
        arithmetic = Arithmetic(batch_size, micro_batch, ranks or 1)
    elif batch_size and steps:
        arithmetic = Arithmetic(batch_size, -(-batch_size // ((ranks or 1) * steps)), ranks or 1)
    elif micro_batch and steps:
        arithmetic = Arithmetic(micro_batch * steps * (ranks or 1), micro_batch, ranks or 1)
    else:
        raise OptionError(
            "give two of --batch-size, --micro-batch and --steps; the rest follows "
            "(--ranks: 1, 2, 4 and 8 unless given)"
        )
    pieces = arithmetic.batch_size // arithmetic.micro_batch
    if max(pieces, arithmetic.ranks) > MOST:
        raise OptionError(
            f"{pieces:,} micro-batches on {arithmetic.ranks:,} ranks: at most {MOST:,} are "
            "supported"
        )
    if whole and ranks and arithmetic.steps != steps:
        raise OptionError(
            f"a batch of {batch_size} in micro-batches of {micro_batch} on {ranks} "
            f"rank{'' if ranks == 1 else 's'} takes {arithmetic.steps} steps, not {steps}: leave "
            "one of the four out, and it follows"
        )
    return arithmetic


def bubble(micro_batches: int, stages: int) -> float:
    """Return the share of a window in which a stage of a pipeline idles (GPipe, 1F1B).

    >>> bubble(8, 4), bubble(27, 4)
    (0.2727272727272727, 0.1)
    """
    return (stages - 1) / (micro_batches + stages - 1)


# --------------------------------------------------------------------------------------- rules


def lr_factor(*, base_batch: int, batch: int, rule: str) -> float:
    """Return the factor of the learning rate when the batch goes from `base_batch` to `batch`.

    >>> lr_factor(base_batch=256, batch=1024, rule="linear")
    4.0
    >>> lr_factor(base_batch=256, batch=1024, rule="sqrt")
    2.0
    """
    ratio = batch / base_batch
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]


def scale_warmup(updates: int, *, base_batch: int, batch: int) -> int:
    """Return the warm-up over the same samples as `updates` of `base_batch`, never shorter.

    >>> scale_warmup(25024, base_batch=256, batch=8192)
    782
    """
    return -(-updates * base_batch // batch)
