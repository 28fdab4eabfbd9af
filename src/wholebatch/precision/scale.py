"""Loss scaling for fp16, with torch's own GradScaler deciding the scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LossScale"]


class LossScale:
    """A GradScaler whose unscaling is left to the window's one factor.

    The scaler's own `unscale_` and `step` would make a pass of their own over the gradients.
    What it needs to decide its next scale is only whether any gradient was not finite; it gets
    that through the gradient of one probe parameter, so that nothing private is touched and the
    user's own scaler, with its state, can be used.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self._probe = torch.nn.Parameter(torch.zeros((), device=device))
        self._probe_optimizer = torch.optim.SGD([self._probe], lr=0.0)

    @property
    def enabled(self) -> bool:
        return self.scaler.is_enabled()

    def scale(self, seed: Tensor) -> Tensor:
        """`seed` times the scale in force, still on the device."""
        scaled: Tensor = self.scaler.scale(seed)
        return scaled

    def value(self) -> float:
        return float(self.scaler.get_scale())

    def update(self, *, finite: bool) -> None:
        """Tell the scaler how the window went: it grows or backs off by its own rules."""
        if not self.enabled:
            return
        self.scaler.scale(torch.zeros((), device=self._probe.device))  # makes its lazy state
        self._probe.grad = torch.full_like(self._probe, 0.0 if finite else float("inf"))
        self.scaler.unscale_(self._probe_optimizer)
        self.scaler.update()
        self._probe.grad = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
