"""Memory that outlives a window: the fp32 gradients, and the 16-bit copies of the weights.

CUDA graphs read and write fixed addresses. So the buffers stay when a window's close clears
`.grad`, and become `.grad` again at the next window's first micro-step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Casts", "Gradients", "buffer_dtype", "take_workspace"]

_ALIGNED = 256
"""Elements; every tensor of a piece begins where kernels can read it in wide words."""
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def buffer_dtype(parameter: Tensor) -> torch.dtype:
    """Gradients of 16-bit parameters are added in fp32, all others in their own dtype."""
    return torch.float32 if parameter.dtype in _SIXTEEN_BIT else parameter.dtype


def in_one_piece(like: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Zeros of these shapes and strides, those of one dtype in one piece of memory.

    One by one they would settle in the gaps that freed activations leave, and hold on to all of the
    memory around them.
    """
    places: dict[torch.dtype, int] = {}
    starts = []
    for tensor, dtype in zip(like, dtypes, strict=True):
        starts.append(places.get(dtype, 0))
        places[dtype] = starts[-1] + -(-tensor.numel() // _ALIGNED) * _ALIGNED
    if not like:
        return []
    device = like[0].device
    pieces = {
        dtype: torch.zeros(length, dtype=dtype, device=device) for dtype, length in places.items()
    }
    return [
        pieces[dtype].as_strided(tensor.shape, _dense_strides(tensor), start)
        for tensor, dtype, start in zip(like, dtypes, starts, strict=True)
    ]


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Its strides where they leave no gaps, else those that `empty_like` would choose."""
    return torch.empty_like(tensor, device="meta").stride()


def take_workspace(device: torch.device) -> None:
    """Let the products of backwards take their workspace now, where it is in nobody's way.

    Autograd's thread has a workspace of its own, taken at its first product and kept: among the
    activations of a backward it would hold on to all of the memory around it.
    """
    with torch.enable_grad():
        one = torch.zeros(16, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
        (one @ one).sum().backward()


class Gradients:
    """One buffer for each parameter that ever had a gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._buffers: dict[int, Tensor] = {}
        self._entered: tuple[int, ...] = ()

    def of(self, used: Sequence[int]) -> list[Tensor]:
        """The buffers of these parameters; made where there is none yet."""
        wanted = [index for index in used if index not in self._buffers]
        like = [self.parameters[index] for index in wanted]
        made = in_one_piece(like, [buffer_dtype(parameter) for parameter in like])
        self._buffers.update(zip(wanted, made, strict=True))
        return [self._buffers[index] for index in used]

    def are_in_place(self, used: tuple[int, ...]) -> bool:
        """Whether the buffers are these parameters' `.grad` at this moment."""
        first = used[0]
        return self._entered == used and (
            self.parameters[first].grad is self._buffers.get(first, self)
        )

    def take_in(self) -> None:
        """What autograd has made moves into the buffers, unless it is sparse."""
        made = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        if all(gradient.layout == torch.strided for _, gradient in made):
            self.put_in_place(tuple(index for index, _ in made))

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
    def of(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """These copies; made where there is none yet."""
        keys = [key for key in dict.fromkeys(wanted) if key not in self._copies]
        sources: list[Tensor] = [self._parameters[index] for index, _ in keys]
        made = in_one_piece(sources, [dtype for _, dtype in keys])
        if made:
            torch._foreach_copy_(made, sources)
        self._copies.update(zip(keys, made, strict=True))
        return [self._copies[key] for key in wanted]

    @torch.no_grad()
    def refresh(self) -> None:
        """The weights have changed: cast all again, into the same memory."""
        if self._copies:
            sources: list[Tensor] = [self._parameters[index] for index, _ in self._copies]
            torch._foreach_copy_(list(self._copies.values()), sources)
