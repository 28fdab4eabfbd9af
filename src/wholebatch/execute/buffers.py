"""Memory that outlives a window: the fp32 gradients, and the 16-bit copies of the weights.

CUDA graphs read and write fixed addresses. So the buffers stay when a window's close clears
`.grad`, and become `.grad` again at the next window's first micro-step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Casts", "Gradients", "buffer_dtype"]

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def buffer_dtype(parameter: Tensor) -> torch.dtype:
    """Gradients of 16-bit parameters are added in fp32, all others in their own dtype."""
    return torch.float32 if parameter.dtype in _SIXTEEN_BIT else parameter.dtype


class Gradients:
    """One buffer for each parameter that ever had a gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._buffers: dict[int, Tensor] = {}
        self._entered: tuple[int, ...] = ()

    def of(self, used: Iterable[int]) -> list[Tensor]:
        """The buffers of these parameters; made where there is none yet."""
        for index in used:
            if index not in self._buffers:
                parameter = self.parameters[index]
                self._buffers[index] = torch.zeros_like(
                    parameter, dtype=buffer_dtype(parameter), requires_grad=False
                )
        return [self._buffers[index] for index in used]

    def are_in_place(self, used: tuple[int, ...]) -> bool:
        """Whether the buffers are these parameters' `.grad` at this moment."""
        first = used[0]
        return self._entered == used and (
            self.parameters[first].grad is self._buffers.get(first, self)
        )

    @torch.no_grad()
    def put_in_place(self, used: tuple[int, ...]) -> None:
        """Make the buffers these parameters' `.grad`, with what that holds already (or zero)."""
        empty, filled, held = [], [], []
        for index, buffer in zip(used, self.of(used), strict=True):
            gradient = self.parameters[index].grad
            if gradient is buffer:
                continue
            if gradient is None:
                empty.append(buffer)
            else:
                filled.append(buffer)
                held.append(gradient.detach().to_dense())
        if empty:
            torch._foreach_zero_(empty)
        if filled:
            torch._foreach_copy_(filled, held)
        for index in used:
            self.parameters[index].grad = self._buffers[index]
        self._entered = used


class Casts:
    """Copies of weights in 16 bit, made once per window and shared by all graphs."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._copies: dict[tuple[int, torch.dtype], Tensor] = {}

    @torch.no_grad()
    def of(self, wanted: Iterable[tuple[int, torch.dtype]]) -> list[Tensor]:
        """These copies; made where there is none yet."""
        for key in wanted:
            if key not in self._copies:
                self._copies[key] = self._parameters[key[0]].detach().to(key[1])
        return [self._copies[key] for key in wanted]

    @torch.no_grad()
    def refresh(self) -> None:
        """The weights have changed: cast all again, into the same memory."""
        if self._copies:
            sources: list[Tensor] = [self._parameters[index] for index, _ in self._copies]
            torch._foreach_copy_(list(self._copies.values()), sources)
