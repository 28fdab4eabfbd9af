"""Rules for a changed batch size: learning rate, warm-up, Adam's betas, weight decay.

These are rules of thumb with a source, not laws: docs/scaling.md has the tables of their tests.

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
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, TypeAlias, get_args

from wholebatch.errors import OptionError

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


By: TypeAlias = Literal["updates", "epochs", "tokens"]

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)([kKMBGT]?)(ep|epochs?|tok|tokens?)?")
_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MOST = 10**18
_SUFFIX = {"updates": "", "epochs": "ep", "tokens": "tok"}


@dataclass(frozen=True)
class Amount:
    """A number of updates, epochs or tokens.

    >>> parse_amount("5ep"), parse_amount("2Mtok"), parse_amount("500")
    (Amount(number=5, by='epochs'), Amount(number=2000000, by='tokens'), Amount(number=500, by='updates'))
    """  # noqa: E501

    number: int
    by: By

    def __str__(self) -> str:
        return f"{self.number}{_SUFFIX[self.by]}"


def parse_amount(text: str, label: str = "") -> Amount:
    """Parse `1000`, `5ep` or `2Mtok`; raise an OptionError for anything else."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{label or text}: {text.strip()!r} must be a number of updates (1000), epochs (2ep) "
            "or tokens (2Mtok; k, M, B, T)"
        )
    # Not a float: 8.2 million must stay a whole number.
    number = Decimal(match[1]) * _THOUSANDS[match[2]]
    kind = match[3] or ""
    by: By = "epochs" if kind.startswith("ep") else "tokens" if kind else "updates"
    if number > _MOST:
        raise OptionError(f"{label or text}: {text.strip()!r} is more {by} than a run can have")
    if number != int(number):
        raise OptionError(f"{label or text}: {text.strip()!r} must be a whole number of {by}")
    return Amount(int(number), by)
