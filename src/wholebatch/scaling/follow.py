"""The learning rate and Adam's betas following the batch size, beside any scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wholebatch.errors import OptionError
from wholebatch.scaling.rules import Rule, adam_betas, check_rule, lr_factor

if TYPE_CHECKING:
    import torch

__all__ = ["Follow"]


class Follow:
    """Multiplies the learning rate of every update by what the batch asks for.

    `set(batch)` says how large the next batch is. The optimizer's own numbers are changed only
    while it steps: schedulers, checkpoints and the reader of `param_groups` see what they would
    see without, so any scheduler goes with it, and resuming needs nothing but `set`.

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
        self.first_batch = first_batch  # of a schedule: where a warm-up starts must not jump
        self.batch = base_batch
        self.warmth = 1.0
        self._found: list[dict[str, Any]] | None = None
        self._hooked = False

    def set(self, batch: int, *, warmth: float = 1.0) -> None:
        """The next batch has so many samples; `warmth` is how far a warm-up is, from 0 to 1."""
        self.batch = batch
        self.warmth = warmth
        changes = self.factor != 1.0 or (self._betas != "keep" and batch != self.base_batch)
        if changes and not self._hooked:
            # Not before there is something to do: hooks keep a close from running ahead.
            self._hooked = True
            self._optimizer.register_step_pre_hook(self._before)
            self._optimizer.register_step_post_hook(self._after)

    @property
    def factor(self) -> float:
        """What the learning rate is multiplied by now.

        A warm-up goes from the rate of the base batch to that of this one (Goyal et al. 2017), or
        from zero where this one (of a schedule: its first) has no higher rate.
        """
        full = self._full(self.batch)
        start = 1.0 if self._full(self.first_batch or self.batch) > 1.0 else 0.0
        return start + (full - start) * self.warmth

    def _full(self, batch: int) -> float:
        return lr_factor(base_batch=self.base_batch, batch=batch, rule=self._rule)

    def rates(self) -> list[float]:
        """The learning rates that the next update is made with, by parameter group."""
        return [float(group["lr"]) * self.factor for group in self._optimizer.param_groups]

    def _before(self, *_: Any) -> None:
        if self._found is not None:  # a step that failed did not come to `_after`
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
