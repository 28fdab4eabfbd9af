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
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

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


if TYPE_CHECKING:
    import torch


class Follow:
    """Scales the learning rate of every update by the rule for its batch size.

    `set(batch)` announces the size of the next batch. The optimizer's own values change only while
    it steps. Schedulers, checkpoints and readers of `param_groups` never see the change, so any
    scheduler works, and resuming needs only `set`.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> follow = Follow(optimizer, base_batch=256, rule="linear")
    >>> follow.set(512)
    >>> weight.grad = torch.ones(1)
    >>> optimizer.step()
    >>> weight.item(), optimizer.param_groups[0]["lr"], follow.rates()
    (0.800000011920929, 0.1, [0.2])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        base_batch: int,
        rule: Rule | str = "none",
        betas: str = "keep",
        weight_decay: str = "keep",
        first_batch: int | None = None,
    ) -> None:
        self._rule = check_rule(rule)
        if betas not in ("keep", "beta2", "both"):
            raise OptionError(f"betas={betas!r}: must be 'keep', 'beta2' or 'both'")
        if betas != "keep" and not all("betas" in group for group in optimizer.param_groups):
            raise OptionError(
                f"betas={betas!r}: {type(optimizer).__name__} has no betas; use 'keep'"
            )
        groups = optimizer.param_groups
        if weight_decay not in ("keep", "tokens"):
            raise OptionError(f"weight_decay={weight_decay!r}: must be 'keep' or 'tokens'")
        if weight_decay != "keep" and not all(g.get("decoupled_weight_decay") for g in groups):
            raise OptionError(
                f"weight_decay={weight_decay!r}: the weight decay of {type(optimizer).__name__} is "
                "not decoupled from its gradient, as AdamW's is; use 'keep'"
            )
        self._optimizer = optimizer
        self._betas = betas
        self._decays = weight_decay != "keep"
        self.base_batch = base_batch
        # The first batch of a schedule: the start of a warm-up must not jump.
        self.first_batch = first_batch
        self.batch = base_batch
        self.warmth = 1.0
        self._gain = 1.0
        self._found: list[dict[str, Any]] | None = None
        self._hooked = False

    def set(self, batch: int, *, warmth: float = 1.0, gain: float = 1.0) -> None:
        """Set the next batch, the progress of a warm-up from 0 to 1, and `AutoBatch.gain`."""
        self.batch, self.warmth = batch, warmth
        self._gain = gain if self._rule == "sqrt" else 1.0
        follows = self._betas != "keep" or self._decays
        changes = self.factor != 1.0 or (follows and batch != self.base_batch)
        if changes and not self._hooked:
            # Register hooks only when needed: they keep a close from running ahead.
            self._hooked = True
            self._optimizer.register_step_pre_hook(self._before)
            self._optimizer.register_step_post_hook(self._after)

    @property
    def factor(self) -> float:
        """Return the present factor of the learning rate.

        A warm-up goes from the rate of the base batch to that of this batch (Goyal et al. 2017). It
        starts from zero if this batch (of a schedule: the first one) has no higher rate.
        """
        full = self._full(self.batch)
        start = 1.0 if self._full(self.first_batch or self.batch) > 1.0 else 0.0
        return (start + (full - start) * self.warmth) * self._gain

    def _full(self, batch: int) -> float:
        return lr_factor(base_batch=self.base_batch, batch=batch, rule=self._rule)

    def rates(self) -> list[float]:
        """Return the learning rates of the next update, by parameter group."""
        return [float(group["lr"]) * self.factor for group in self._optimizer.param_groups]

    def _before(self, *_: Any) -> None:
        if self._found is not None:  # A step that failed never reached `_after`.
            self._after()
        self._found = []
        for group in self._optimizer.param_groups:
            names = ["lr"] + ["betas"] * (self._betas != "keep") + ["weight_decay"] * self._decays
            self._found.append({name: group[name] for name in names})
        factor, sizes = self.factor, {"base_batch": self.base_batch, "batch": self.batch}
        for group in self._optimizer.param_groups:
            if factor != 1.0:
                group["lr"] = group["lr"] * factor
            if self._betas != "keep":
                group["betas"] = adam_betas(group["betas"], **sizes, first=self._betas == "both")
            if self._decays:
                group["weight_decay"] = scale_weight_decay(
                    group["weight_decay"], **sizes, rule=self._rule
                )

    def _after(self, *_: Any) -> None:
        for group, found in zip(self._optimizer.param_groups, self._found or (), strict=True):
            group.update(found)
        self._found = None
