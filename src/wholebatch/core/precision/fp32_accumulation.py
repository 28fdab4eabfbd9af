"""fp32 accumulation of the gradients of 16-bit parameters.

bf16 keeps 8 bits: after a few dozen additions, a micro-batch's gradient falls below half a unit in
the last place of the sum and is lost (error 1.1e-1 after 256 additions; 1e-8 in fp32).
`Parameter.grad_dtype` makes autograd itself add into an fp32 `.grad`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["SIXTEEN_BIT", "SixteenBit", "round_gradient"]

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class SixteenBit:
    """fp32 accumulation for the 16-bit parameters of the optimizers.

    At the close, an optimizer that accepts fp32 gradients (SGD, Adagrad, RMSprop, ...) gets them as
    they are. Others (the Adam family) get them rounded once to the parameter's dtype, as the
    gradient of the undivided batch would be.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._rounded: list[torch.nn.Parameter] = []
        self._parameters: list[torch.nn.Parameter] = []
        for optimizer in optimizers:
            mine = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.dtype in SIXTEEN_BIT
            ]
            if not mine:
                continue
            self._parameters += mine
            if not _takes_fp32_gradients(optimizer, mine[0]):
                self._rounded += mine

    def __bool__(self) -> bool:
        return bool(self._parameters)

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The 16-bit parameters of the optimizers."""
        return self._parameters

    def rounds(self, parameter: torch.nn.Parameter) -> bool:
        """True if the optimizer gets this parameter's gradient rounded to the parameter's dtype."""
        return any(parameter is one for one in self._rounded)

    def begin(self) -> None:
        """Make autograd add in fp32. Called when a window opens, before there is a gradient."""
        for parameter in self._parameters:
            if parameter.grad_dtype is not torch.float32:
                parameter.grad_dtype = torch.float32

    def round_once(self) -> None:
        """Round the gradients for optimizers that need the parameter's dtype, before the step."""
        for parameter in self._rounded:
            round_gradient(parameter)

    def end(self) -> None:
        """Restore the parameters' `grad_dtype`, after the gradients are cleared."""
        for parameter in self._parameters:
            parameter.grad_dtype = parameter.dtype


def round_gradient(parameter: torch.nn.Parameter) -> None:
    """Round the gradient of a parameter to the parameter's dtype."""
    gradient = parameter.grad
    if gradient is not None:
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype
        parameter.grad = gradient.to(parameter.dtype)


def _takes_fp32_gradients(optimizer: torch.optim.Optimizer, like: Tensor) -> bool:
    """True if this kind of optimizer can step a 16-bit parameter with an fp32 gradient."""
    try:
        # Use real tensors even in a prediction: with fake ones no kernel refuses its input, and no
        # number can be read.
        with warnings.catch_warnings(), _disable_current_modes():
            warnings.simplefilter("ignore")
            probe = torch.nn.Parameter(torch.zeros(2, dtype=like.dtype, device=like.device))
            probe.grad_dtype = torch.float32
            probe.grad = torch.zeros(2, dtype=torch.float32, device=like.device)
            type(optimizer)([probe], **optimizer.defaults).step()
    except Exception:  # An unknown optimizer may raise anything; rounding is safe.
        return False
    return True
