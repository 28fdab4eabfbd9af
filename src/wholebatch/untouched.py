"""That nobody else touches an open window of a user's own loop.

A loop that is changed by one line keeps its other lines: an `optimizer.zero_grad()` at its top
drops what the window has summed so far, an `optimizer.step()` updates from a part of it, and a
plain `loss.backward()` adds what the window does not count. None of them fails by itself, so they
are looked for, between two backwards, on one small parameter: every write to a tensor in place
moves its version, and reading that costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wholebatch.errors import WindowError
from wholebatch.gradients import DeviceStore

if TYPE_CHECKING:
    from wholebatch.window import Window

__all__ = ["Untouched", "Watch"]

_requires_grad = attrgetter("requires_grad")


class Watch:
    """One small parameter, as the last backward of a window left it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The window is over, or another one has been loaded."""
        self._parameter: nn.Parameter | None = None
        self._gradient: Tensor | None = None
        self._value: Tensor | None = None
        self._versions = (0, 0)

    def remember(self, inputs: Sequence[nn.Parameter]) -> None:
        """A backward of the window is made: how it leaves the parameter and its gradient."""
        if self._parameter is None:
            if not inputs:
                return
            made = [parameter for parameter in inputs if parameter.grad is not None]
            self._parameter = min(made or inputs, key=Tensor.numel)
            self._value = self._parameter.detach().clone()
        self._gradient = self._parameter.grad
        version = 0 if self._gradient is None else self._gradient._version
        self._versions = (self._parameter._version, version)

    def changed(self, inputs: Sequence[nn.Parameter]) -> tuple[nn.Parameter, str] | None:
        """Return what was touched since: a parameter and "gradient", "value" or "frozen"."""
        parameter = self._parameter
        if parameter is None:
            return None
        gradient, versions = parameter.grad, self._versions
        version = 0 if gradient is None else gradient._version
        if (
            gradient is self._gradient
            and (parameter._version, version) == versions
            and all(map(_requires_grad, inputs))
        ):
            return None  # as in nearly every micro-step, which may be a short one
        if gradient is not self._gradient or version != versions[1]:
            return parameter, "gradient"
        moved = parameter._version != versions[0]  # also weights swapped out and back again
        if moved and self._value is not None and not torch.equal(parameter, self._value):
            return parameter, "value"
        frozen = next((one for one in inputs if not one.requires_grad), None)
        return None if frozen is None else (frozen, "frozen")


_WHY = {
    "gradient": (
        "the gradient of {} has changed since the window's last backward. A window makes, clips "
        "and clears its gradients itself: remove zero_grad(), loss.backward() and gradient "
        "clipping from the loop (clip_norm= clips)"
    ),
    "value": (
        "{} has changed in the middle of the window. The window's last backward makes the "
        "update: remove optimizer.step() from the loop"
    ),
    "frozen": (
        "{} was frozen in the middle of the window. Freeze and unfreeze between windows, where "
        "backward() has returned a Step"
    ),
}


class Untouched:
    """That a loop of the user's own leaves an open window alone."""

    def __init__(self, window: Window) -> None:
        self._window = window
        sync = window.sync
        # Elsewhere gradients are not in `.grad` between two backwards, or the engine moves them.
        plain = type(window.store) is DeviceStore and not sync.grows_own_graph
        self._looks = plain and sync.keeps_gradients
        self._watch = Watch()
        self.forget = self._watch.forget

    def remember(self) -> None:
        """A backward of the window is made: how it leaves the parameter and its gradient."""
        if self._looks:
            self._watch.remember(self._window.inputs)

    def check(self) -> None:
        """Refuse to go on with a window that is no longer what its backwards made."""
        window = self._window
        found = self._watch.changed(window.inputs)
        if found is None or not window.is_open or window.broken:
            return
        parameter, what = found
        held = f"discard() drops the {window.micro_batches} micro-batches that this window holds"
        raise WindowError(f"{_WHY[what].format(window.target.name_of(parameter))}; {held}")
