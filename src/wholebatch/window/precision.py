"""The number formats of a micro-batch's computation and of its gradient sums.

`choose` returns how the forward runs (`autocast.py`), `LossScale` keeps fp16 gradients in
range, and `SixteenBit` adds the gradients of 16-bit parameters in fp32. bf16 keeps 8 bits: after a
few dozen additions, a micro-batch's gradient falls below half a unit in the last place of the sum
and is lost (error 1.1e-1 after 256 additions; 1e-8 in fp32). `Parameter.grad_dtype` makes autograd
itself add into an fp32 `.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.window.autocast import Autocast, Full, OwnAutocast, Precision

PrecisionName: TypeAlias = Literal["full", "fp32", "bf16", "fp16"]


def choose(precision: str, device_type: str, *, keeps: bool = True) -> Precision:
    """Return the precision with this name, or raise an OptionError that lists the names.

    `keeps`: weights may be cast once per window, instead of once per micro-batch.
    """
    if precision in ("full", "fp32"):
        return Full()
    if precision == "bf16":
        return Autocast(device_type, torch.bfloat16, keeps=keeps)
    if precision == "fp16":
        return Autocast(device_type, torch.float16, keeps=keeps)
    if precision == "model's bf16":
        return OwnAutocast(device_type, torch.bfloat16, keeps=keeps)
    raise OptionError(
        f"precision={precision!r}: must be 'full' (the parameters' own dtype; 'fp32' is the same), "
        "or 'bf16' or 'fp16' (autocast)"
    )


class LossScale:
    """A GradScaler whose unscaling is part of the window's single factor.

    The scaler's own `unscale_` and `step` would make an extra pass over the gradients. To decide
    its next scale, it only needs to know if any gradient was not finite. It learns that from the
    gradient of one probe parameter. So no private attribute is written, and the user's own scaler
    can be used with its state.
    """

    is_undone_at_close: bool = True
    """False if the library divides the gradients by the scale, after the close."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self._probe = torch.nn.Parameter(torch.zeros((), device=device))
        self._probe_optimizer = torch.optim.SGD([self._probe], lr=0.0)

    @property
    def enabled(self) -> bool:
        return self.scaler.is_enabled()

    def value(self) -> float:
        """Return the scale; a scaler sets up its own state when it first scales something."""
        return float(self.scaler.scale(torch.ones((), device=self._probe.device)))

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


SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class SixteenBit:
    """fp32 accumulation for the 16-bit parameters of a window.

    The optimizer gets each gradient rounded once to the parameter's dtype, as the gradient of the
    undivided batch would be.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make autograd add in fp32. Called when a window opens, before there is a gradient."""
        self.parameters = [p for p in parameters if p.dtype in SIXTEEN_BIT]
        if self.parameters and not hasattr(nn.Parameter, "grad_dtype"):
            raise UnsupportedError(
                f"16-bit parameters with torch {torch.__version__}: adding their gradients in "
                'fp32 needs torch 2.11; keep float32 parameters, and use precision="bf16"'
            )
        for parameter in self.parameters:
            parameter.grad_dtype = torch.float32

    def round_once(self) -> None:
        """Round the gradients to the parameters' dtype, before the step."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
                parameter.grad = gradient.to(parameter.dtype)

    def end(self) -> None:
        """Restore the parameters' `grad_dtype`; their gradients were rounded, or are gone."""
        for parameter in self.parameters:
            parameter.grad_dtype = parameter.dtype
