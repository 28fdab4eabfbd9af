"""Batch arithmetic, and rules for a changed batch size. Nothing here imports torch.

The arithmetic is exact: global batch = micro-batch × steps × ranks, even with a remainder.

The rules for learning rate, warm-up, Adam's betas and weight decay are rules of thumb with a
source, not laws: docs/scaling.md has the tables of their tests.

- linear: Goyal et al. 2017 (arXiv:1706.02677), SGD with momentum.
- sqrt: Krizhevsky 2014 (arXiv:1404.5997); for Adam Malladi et al. 2022 (arXiv:2205.10287), together
  with the betas.
- betas at the same half-life in tokens: Marek et al. 2025 (arXiv:2507.07101).
- warm-up over the same samples: Goyal et al.; over the same updates (epochs in proportion to the
  batch): You et al. 2019 (arXiv:1901.08256, 1904.00962).
- weight decay at the same half-life in tokens: Bergsma et al. 2025 (arXiv:2505.13738).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias, get_args

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


# --------------------------------------------------------------------------------------- rules

Rule: TypeAlias = Literal["linear", "sqrt", "none"]


def check_rule(rule: object, label: str = "rule=") -> Rule:
    """Return the rule, or raise an OptionError that lists the rules."""
    if rule not in get_args(Rule):
        allowed = ", ".join(get_args(Rule))
        raise OptionError(f"{label}{rule}: must be one of {allowed}")
    return rule  # type: ignore[return-value]


def lr_factor(*, base_batch: float, batch: float, rule: str) -> float:
    """Return the factor of the learning rate when the batch goes from `base_batch` to `batch`.

    >>> lr_factor(base_batch=256, batch=1024, rule="linear")
    4.0
    >>> lr_factor(base_batch=256, batch=1024, rule="sqrt")
    2.0
    """
    _positive("base_batch", base_batch)
    _positive("batch", batch)
    ratio = batch / base_batch
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[check_rule(rule)]


def scale_warmup(updates: float, *, base_batch: float, batch: float, keep: str = "samples") -> int:
    """Return the warm-up updates for `batch`, given a good number for `base_batch`.

    `keep="samples"` warms up over the same data (Goyal et al.: five epochs, whatever the batch).
    `keep="updates"` warms up over the same number of updates, so over epochs in proportion to the
    batch (You et al.). `keep="ratio"` multiplies the updates by batch / base_batch, as some
    tutorials do; we know no source that measured it. The result is rounded up: never shorter than
    asked.

    >>> scale_warmup(25024, base_batch=256, batch=8192)
    782
    """
    if not 0 <= updates < math.inf:
        raise OptionError(f"updates={updates!r}: must be a number of updates, at least 0")
    _positive("base_batch", base_batch)
    _positive("batch", batch)
    if keep not in ("samples", "updates", "ratio"):
        raise OptionError(f"keep={keep!r}: must be 'samples', 'updates' or 'ratio'")
    if keep == "updates":
        return math.ceil(updates)
    if keep == "ratio":
        return _rounded_up(updates, batch, base_batch)
    return _rounded_up(updates, base_batch, batch)


def epochs_in_updates(epochs: float, *, samples: int, batch: int) -> int:
    """Convert epochs to updates, rounded up.

    >>> epochs_in_updates(5, samples=1_281_167, batch=8192)
    782
    """
    _positive("samples", samples)
    _positive("batch", batch)
    if not 0 <= epochs < math.inf:
        raise OptionError(f"epochs={epochs!r}: must be a number, at least 0")
    return _rounded_up(epochs, samples, batch)


def half_life(beta: float, *, tokens: float = 1.0) -> float:
    """Return after how many tokens a moving average has forgotten half, at `tokens` per update.

    >>> round(half_life(0.95, tokens=512 * 1024))
    7084917
    """
    _beta("beta", beta)
    _positive("tokens", tokens)
    if beta == 0.0:
        return 0.0
    return tokens * math.log(0.5) / math.log(beta)


def adam_betas(
    betas: tuple[float, float], *, base_batch: float, batch: float, first: bool = False
) -> tuple[float, float]:
    """Return Adam's betas with the half-life in tokens that they had at `base_batch`.

    A moving average decays by `beta` per update. An update of `batch / base_batch` times as many
    tokens must decay by that power of it. Only β2 changes, unless `first=True` asks for β1 too.

    >>> adam_betas((0.9, 0.95), base_batch=512, batch=1)               # Marek et al. 2025
    (0.9, 0.9998998228024699)
    """
    _positive("base_batch", base_batch)
    _positive("batch", batch)
    if len(betas) != 2:
        raise OptionError(f"betas={betas!r}: must be two numbers, such as (0.9, 0.95)")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        _beta(name, beta)
    power = batch / base_batch
    return (betas[0] ** power if first else betas[0], betas[1] ** power)


def scale_weight_decay(decay: float, *, base_batch: float, batch: float, rule: str) -> float:
    """Return AdamW's weight decay with the half-life in tokens that it had at `base_batch`.

    An update shrinks the weights by the factor 1 − lr × decay, so they forget over 1 / (lr × decay)
    updates. At k times the batch, k times the product forgets over the same tokens. The rule for
    the learning rate gives a part of that.

    >>> scale_weight_decay(0.1, base_batch=64, batch=256, rule="sqrt")
    0.2
    """
    if not 0 <= decay < math.inf:
        raise OptionError(f"decay={decay!r}: must be a number, at least 0")
    factor = lr_factor(base_batch=base_batch, batch=batch, rule=rule)
    return decay * (batch / base_batch) / factor


def _rounded_up(number: float, times: float, over: float) -> int:
    if isinstance(number, int) and isinstance(times, int) and isinstance(over, int):
        return -(-number * times // over)  # Exact: a float has only 53 bits.
    return math.ceil(number * times / over)


def _positive(name: str, value: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise OptionError(f"{name}={value!r}: must be a number above 0")


def _beta(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise OptionError(f"{name}={value!r}: must be at least 0 and below 1")
