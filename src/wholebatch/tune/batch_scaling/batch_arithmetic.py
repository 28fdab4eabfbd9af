"""Exact batch arithmetic: global batch = micro-batch × steps × ranks, even with a remainder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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


def pieces_of(samples: int, micro_batch: int) -> tuple[int, ...]:
    """Return the micro-batch sizes of a rank's share: full ones, then the rest.

    >>> pieces_of(10, 4)
    (4, 4, 2)
    """
    whole, rest = divmod(samples, micro_batch)
    return (micro_batch,) * whole + (rest,) * bool(rest)


@dataclass(frozen=True)
class Arithmetic:
    """The division of one global batch: each rank's share and each micro-batch's size.

    >>> batch = solve(global_batch=100, micro_batch=8, ranks=3)
    >>> batch.steps, batch.shares
    (5, (34, 33, 33))
    >>> batch.micro_batches[0], batch.micro_batches[2]
    ((8, 8, 8, 8, 2), (8, 8, 8, 8, 1))
    >>> print(batch)
    (8 × 4 + 2) × 1 rank + (8 × 4 + 1) × 2 ranks = 100
    """

    global_batch: int
    micro_batch: int
    ranks: int

    @property
    def shares(self) -> tuple[int, ...]:
        """Return the samples of each rank; their sum is the global batch."""
        slices = (share_of(self.global_batch, rank=r, ranks=self.ranks) for r in range(self.ranks))
        return tuple(one.stop - one.start for one in slices)

    @property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """Return the samples of each micro-batch of each rank."""
        return tuple(pieces_of(share, self.micro_batch) for share in self.shares)

    @property
    def steps(self) -> int:
        """Return the most micro-batches of any rank."""
        most = -(-self.global_batch // self.ranks)  # The share of the first rank.
        return -(-most // self.micro_batch)

    @property
    def is_even(self) -> bool:
        """True if every micro-batch of every rank has the same size."""
        return self.micro_batch * self.steps * self.ranks == self.global_batch

    def __str__(self) -> str:
        return runs_said(self.micro_batches)

    def as_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        return {
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "steps": self.steps,
            "ranks": self.ranks,
            "is_even": self.is_even,
            "shares": list(self.shares),
            "micro_batches": [list(sizes) for sizes in self.micro_batches],
            "said": str(self),
        }


MOST = 10_000_000
"""The most micro-batches of one update; longer lists would fill the memory."""
MOST_RANKS = 1_000_000
_MOST_SAMPLES = 10**18


def solve(
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    steps: int | None = None,
    ranks: int | None = None,
) -> Arithmetic:
    """Compute one of the four from the others; `ranks` is 1 if only two of the others are given.

    The result is the smallest possible: the fewest steps that cover the global batch, or the
    smallest micro-batch or the fewest ranks that need no more steps.

    >>> solve(micro_batch=8, steps=4, ranks=2).global_batch
    64
    >>> solve(global_batch=64, steps=4, ranks=2).micro_batch
    8
    >>> solve(global_batch=64, micro_batch=8, steps=4).ranks
    2
    >>> solve(global_batch=64, micro_batch=8).steps
    8
    """
    given = {"global_batch": global_batch, "micro_batch": micro_batch}
    given |= {"steps": steps, "ranks": ranks}
    known = {name: value for name, value in given.items() if value is not None}
    for name, value in known.items():
        check_count(name, value)
    missing = given.keys() - known.keys()
    if len(missing - {"ranks"}) > 1:
        has = ", ".join(f"{name}={value}" for name, value in known.items())
        raise OptionError(
            f"{has or 'nothing'} given: two of global_batch, micro_batch and steps are needed "
            "(ranks is 1 unless given), the rest follows"
        )
    if missing == {"ranks"}:
        known["ranks"] = -(-known["global_batch"] // (known["micro_batch"] * known["steps"]))
    known.setdefault("ranks", 1)
    if "global_batch" in missing:
        known["global_batch"] = known["micro_batch"] * known["steps"] * known["ranks"]
        check_count("global_batch", known["global_batch"])
    elif "micro_batch" in missing:
        known["micro_batch"] = -(-known["global_batch"] // (known["ranks"] * known["steps"]))
    found = _within_reason(Arithmetic(known["global_batch"], known["micro_batch"], known["ranks"]))
    if not missing and found.steps != steps:
        raise OptionError(
            f"global_batch={global_batch}, micro_batch={micro_batch}, ranks={ranks} make "
            f"{found.steps} steps, not steps={steps}: leave one of the four out, and it follows"
        )
    return found


def _within_reason(batch: Arithmetic) -> Arithmetic:
    pieces = batch.global_batch // batch.micro_batch
    if pieces > MOST:
        raise OptionError(
            f"global_batch={batch.global_batch}, micro_batch={batch.micro_batch}: make {pieces:,} "
            f"micro-batches; at most {MOST:,} are supported"
        )
    if batch.ranks > MOST_RANKS:
        raise OptionError(f"ranks={batch.ranks}: at most {MOST_RANKS:,} are supported")
    return batch


def runs_said(by_rank: Sequence[Sequence[int]]) -> str:
    """Return the sizes by rank as a sum that a person can check.

    >>> runs_said([(8, 5), (8, 4), (8, 5)])
    '(8 × 1 + 5) × 2 ranks + (8 × 1 + 4) × 1 rank = 38'
    """
    alike = Counter(map(tuple, by_rank))  # In the order of the first rank of each kind.
    terms = []
    for sizes, ranks in alike.items():
        runs = [(size, len(list(same))) for size, same in groupby(sizes or (0,))]
        inner = " + ".join(
            f"{size}" if count == 1 and index else f"{size} × {count}"
            for index, (size, count) in enumerate(runs)
        )
        if len(runs) > 1:
            inner = f"({inner})"
        terms.append(f"{inner} × {ranks} rank{'' if ranks == 1 else 's'}")
    return f"{' + '.join(terms)} = {sum(map(sum, by_rank))}"


def check_count(name: str, value: object) -> None:
    """Refuse a value that is not a number of samples, steps or ranks."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r}: must be a whole number, at least 1")
    if value > _MOST_SAMPLES:
        raise OptionError(f"{name}={value!r}: at most {_MOST_SAMPLES:,} are supported")
