"""That nobody else touches an open window of a user's own loop.

A loop that is changed by one line keeps its other lines: an `optimizer.zero_grad()` at its top
drops what the window has summed so far, an `optimizer.step()` updates from a part of it, and a
plain `loss.backward()` adds what the window does not count. None of them fails by itself, so they
are looked for, between two backwards, on one small parameter: every write to a tensor in place
moves its version, and reading that costs nothing.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from wholebatch.errors import WindowError
from wholebatch.gradients import DeviceStore

if TYPE_CHECKING:
    from wholebatch.window import Window

__all__ = ["Untouched"]

_requires_grad = attrgetter("requires_grad")


class Untouched:
    """One parameter of an open window, as the window's last backward left it."""

    def __init__(self, window: Window) -> None:
        self._window = window
        sync = window.sync
        # Elsewhere gradients are not in `.grad` between two backwards, or the engine moves them.
        plain = type(window.store) is DeviceStore and not sync.grows_own_graph
        self._looks = plain and sync.keeps_gradients
        self.forget()

    def forget(self) -> None:
        """The window is over, or another one has been loaded."""
        self._parameter: nn.Parameter | None = None
        self._gradient: Tensor | None = None
        self._value: Tensor | None = None
        self._versions = (0, 0)

    def remember(self) -> None:
        """A backward of the window is made: how it leaves the parameter and its gradient."""
        if not self._looks:
            return
        if self._parameter is None:
            made = [p for p in self._window.inputs if p.grad is not None]
            if not made:
                return
            self._parameter = min(made, key=Tensor.numel)
            self._value = self._parameter.detach().clone()
        self._gradient = self._parameter.grad
        assert self._gradient is not None
        self._versions = (self._parameter._version, self._gradient._version)

    def check(self) -> None:
        """Refuse to go on with a window that is no longer what its backwards made."""
        parameter = self._parameter
        if parameter is None:
            return
        gradient = parameter.grad
        versions = self._versions
        if (
            gradient is self._gradient
            and gradient is not None
            and (parameter._version, gradient._version) == versions
            and all(map(_requires_grad, self._window.inputs))
        ):
            return  # as in nearly every micro-step, which may be a short one
        if not self._window.is_open or self._window.broken:
            return
        if gradient is None or gradient is not self._gradient or gradient._version != versions[1]:
            self._refuse(
                parameter,
                "the gradient of {} has changed since the window's last backward. A window makes, "
                "clips and clears its gradients itself: remove zero_grad(), loss.backward() and "
                "gradient clipping from the loop (clip_norm= clips)",
            )
        moved = parameter._version != versions[0]  # also weights swapped out and back again
        if moved and self._value is not None and not torch.equal(parameter, self._value):
            self._refuse(
                parameter,
                "{} has changed in the middle of the window. The window's last backward makes the "
                "update: remove optimizer.step() from the loop",
            )
        frozen = next((p for p in self._window.inputs if not p.requires_grad), None)
        if frozen is not None:
            self._refuse(
                frozen,
                "{} was frozen in the middle of the window. Freeze and unfreeze between windows, "
                "where backward() has returned a Step",
            )

    def _refuse(self, parameter: nn.Parameter, why: str) -> NoReturn:
        window = self._window
        held = f"discard() drops the {window.micro_batches} micro-batches that this window holds"
        raise WindowError(f"{why.format(window.target.name_of(parameter))}; {held}")
