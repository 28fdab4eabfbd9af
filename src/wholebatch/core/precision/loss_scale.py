"""Loss scaling for fp16; torch's own GradScaler decides the scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LossScale"]


class LossScale:
    """A GradScaler whose unscaling is part of the window's single factor.

    The scaler's own `unscale_` and `step` would make an extra pass over the gradients. To decide
    its next scale, it only needs to know if any gradient was not finite. It learns that from the
    gradient of one probe parameter. So no private attribute is touched, and the user's own scaler
    can be used with its state.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self._probe = torch.nn.Parameter(torch.zeros((), device=device))
        self._probe_optimizer = torch.optim.SGD([self._probe], lr=0.0)

    @property
    def enabled(self) -> bool:
        return self.scaler.is_enabled()

    def scale(self, seed: Tensor) -> Tensor:
        """Return `seed` times the current scale, still on the device."""
        scaled: Tensor = self.scaler.scale(seed)
        return scaled

    def value(self) -> float:
        return float(self.scaler.get_scale())

    def update(self, *, finite: bool) -> None:
        """Tell the scaler if the window was finite; it grows or backs off by its own rules."""
        if not self.enabled:
            return
        self.scaler.scale(torch.zeros((), device=self._probe.device))  # Initialise its lazy state.
        self._probe.grad = torch.full_like(self._probe, 0.0 if finite else float("inf"))
        self.scaler.unscale_(self._probe_optimizer)
        self.scaler.update()
        self._probe.grad = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
