"""A learning rate and Adam betas that follow the batch size, beside any scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wholebatch.errors import OptionError
from wholebatch.tune.batch_scaling.scaling_rules import Rule, adam_betas, check_rule, lr_factor

if TYPE_CHECKING:
    import torch

__all__ = ["Follow"]


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
        first_batch: int | None = None,
    ) -> None:
        self._rule = check_rule(rule)
        if betas not in ("keep", "beta2", "both"):
            raise OptionError(f"betas={betas!r}: must be 'keep', 'beta2' or 'both'")
        if betas != "keep" and not all("betas" in group for group in optimizer.param_groups):
            raise OptionError(
                f"betas={betas!r}: {type(optimizer).__name__} has no betas; use 'keep'"
            )
        self._optimizer = optimizer
        self._betas = betas
        self.base_batch = base_batch
        # The first batch of a schedule: the start of a warm-up must not jump.
        self.first_batch = first_batch
        self.batch = base_batch
        self.warmth = 1.0
        self._found: list[dict[str, Any]] | None = None
        self._hooked = False

    def set(self, batch: int, *, warmth: float = 1.0) -> None:
        """Set the size of the next batch; `warmth` is the progress of a warm-up, from 0 to 1."""
        self.batch = batch
        self.warmth = warmth
        changes = self.factor != 1.0 or (self._betas != "keep" and batch != self.base_batch)
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
        return start + (full - start) * self.warmth

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
            found = {"lr": group["lr"]}
            if self._betas != "keep":
                found["betas"] = group["betas"]
            self._found.append(found)
        factor = self.factor
        for group in self._optimizer.param_groups:
            if factor != 1.0:
                group["lr"] = group["lr"] * factor
            if self._betas != "keep":
                group["betas"] = adam_betas(
                    group["betas"],
                    base_batch=self.base_batch,
                    batch=self.batch,
                    first=self._betas == "both",
                )

    def _after(self, *_: Any) -> None:
        for group, found in zip(self._optimizer.param_groups, self._found or (), strict=True):
            group.update(found)
        self._found = None
