"""Gradients of 16-bit parameters, added in fp32.

bf16 keeps 8 bits: after a few dozen additions a micro-batch's gradient falls below half a unit
in the last place of the sum and is lost (1.1e-1 error after 256 additions; 1e-8 in fp32).
`Parameter.grad_dtype` makes autograd itself add into an fp32 `.grad`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["SIXTEEN_BIT", "SixteenBit"]

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class SixteenBit:
    """fp32 accumulation for those parameters of an optimizer that are 16-bit.

    At the close the fp32 gradient goes to the optimizer as it is if the optimizer can take it
    (SGD, Adagrad, RMSprop, ...); others (the Adam family) get it rounded once to the parameter's
    dtype, which is what the undivided batch's own gradient would be.
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
        """Whether the optimizer gets this parameter's gradient rounded to the parameter's dtype."""
        return any(parameter is one for one in self._rounded)

    def begin(self) -> None:
        """A window opens, and no gradient is there yet: autograd is to add in fp32."""
        for parameter in self._parameters:
            if parameter.grad_dtype is not torch.float32:
                parameter.grad_dtype = torch.float32

    def round_once(self) -> None:
        """Before the step: give the optimizer gradients of the dtype that it can take."""
        for parameter in self._rounded:
            gradient = parameter.grad
            if gradient is not None:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
                parameter.grad = gradient.to(parameter.dtype)

    def end(self) -> None:
        """The gradients are cleared: leave the parameters as they were found."""
        for parameter in self._parameters:
            parameter.grad_dtype = parameter.dtype


def _takes_fp32_gradients(optimizer: torch.optim.Optimizer, like: Tensor) -> bool:
    """Whether a step of this kind of optimizer works on a 16-bit parameter with fp32 gradient."""
    try:
        # Real tensors also in a prediction: on fake ones a kernel refuses nothing, and a number
        # cannot be read.
        with warnings.catch_warnings(), _disable_current_modes():
            warnings.simplefilter("ignore")
            probe = torch.nn.Parameter(torch.zeros(2, dtype=like.dtype, device=like.device))
            probe.grad_dtype = torch.float32
            probe.grad = torch.zeros(2, dtype=torch.float32, device=like.device)
            type(optimizer)([probe], **optimizer.defaults).step()
    except Exception:  # whatever an unknown optimizer raises, the rounded gradient is the safe way
        return False
    return True
