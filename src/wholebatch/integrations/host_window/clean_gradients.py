"""A window of a host begins clean, is left alone while it is open, and ends used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.core.foreign_writes import Watch
from wholebatch.errors import WindowError
from wholebatch.integrations.host_window.host_gradients import all_parameters, left_over

__all__ = ["Clean"]

_TOUCHED = {
    "gradient": (
        "the gradient of {} has changed since the window's last backward: call zero_grad(), clip "
        "gradients and make other backwards only when the window is complete"
    ),
    "value": (
        "{} has changed in the middle of the window: call optimizer.step() only when the window is "
        "complete"
    ),
    "frozen": "{} was frozen in the middle of the window: freeze and unfreeze between windows",
}


class Clean:
    """What nobody else may touch: the parameters of a window's optimizers and their gradients."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._models, self._optimizers = models, optimizers
        self._watch = Watch(optimizers)
        self._inputs: list[nn.Parameter] = []
        self.unused = False  # whether a window was settled that no step was made from
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.unused = False

    def forget(self) -> None:
        """The window is over."""
        self._watch.forget()

    def begin(self, *, in_grad: bool) -> None:
        """Refuse gradients that are there before the window's first backward."""
        self._take()
        dirty = left_over(self._inputs) if in_grad else None
        if dirty is None:
            return
        why = (
            "the window before was completed, but no optimizer.step() was made from it"
            if self.unused
            else "this window did not make it"
        )
        raise WindowError(
            f"{self._name_of(dirty)} holds a gradient at the first backward of a window, and it "
            f"would be counted in ({why}): call optimizer.zero_grad() after every "
            "optimizer.step(), and give every loss to the window"
        )

    def _take(self) -> None:
        found = all_parameters(() if self._optimizers else self._models, self._optimizers)
        self._inputs = [parameter for parameter in found if parameter.requires_grad]

    def remember(self) -> None:
        """A backward of the window is made: how it leaves the gradients."""
        if not self._inputs:  # a window that was loaded
            self._take()
        self._watch.remember(self._inputs)

    def check(self, micro_batches: int) -> None:
        """Refuse to go on with a window that is no longer what its backwards made."""
        found = self._watch.changed(self._inputs)
        if found is None:
            self._watch.warn_of_rates()
            return
        parameter, what = found
        raise WindowError(
            f"{_TOUCHED[what].format(self._name_of(parameter))}; discard() and zero_grad() drop "
            f"the {micro_batches} micro-batches that this window holds"
        )

    def _name_of(self, parameter: nn.Parameter) -> str:
        for model in self._models:
            for name, one in model.named_parameters():
                if one is parameter:
                    return name
        return f"a parameter of shape {tuple(parameter.shape)}"
