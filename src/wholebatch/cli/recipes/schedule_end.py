"""A learning-rate schedule with an end: what happens after it, and when the end is moved."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["Horizon", "with_horizon"]


class Horizon:
    """A scheduler that was made for so many updates; after them the rate stays as it is.

    Torch's own go on: a cosine rises again, a one-cycle schedule raises an error.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2)
    >>> held = Horizon(schedule, 2)
    >>> rates = []
    >>> for _ in range(4):
    ...     _ = optimizer.step(), held.step()
    ...     rates.append(optimizer.param_groups[0]["lr"])
    >>> rates
    [0.75, 0.5, 0.5, 0.5]
    """

    def __init__(self, scheduler: LRScheduler, updates: int) -> None:
        self.scheduler = scheduler
        self.optimizer = scheduler.optimizer
        self.updates = updates
        self._made = 0  # updates so far, those beyond the last too
        # What the scheduler sets, at its beginning: rates, and momenta or betas of some.
        self._start = [_numbers(group) for group in self.optimizer.param_groups]

    def step(self) -> None:
        """Go on to the next update; nothing happens beyond the last."""
        self._made += 1
        if self.scheduler.last_epoch < self.updates:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state, for how many updates it is, and how many were made."""
        return {**self.scheduler.state_dict(), "horizon": self.updates, "made": self._made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; one made for another number of updates is made anew up to there."""
        own = {name: value for name, value in state.items() if name not in ("horizon", "made")}
        self._made = int(state.get("made", state["last_epoch"]))
        if state.get("horizon", self.updates) == self.updates:
            self.scheduler.load_state_dict(own)
            return
        for group, start in zip(self.optimizer.param_groups, self._start, strict=True):
            group.update(start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer steps between these
            for _ in range(min(self._made, self.updates)):
                self.scheduler.step()


def with_horizon(scheduler: Any, updates: int) -> Any:
    """Return torch's schedulers, in a list too, with their end; others as they are."""
    if isinstance(scheduler, list | tuple):
        return [with_horizon(one, updates) for one in scheduler]
    if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
        return Horizon(scheduler, updates)
    return scheduler


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
