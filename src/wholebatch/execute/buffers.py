"""Memory that outlives a window: the fp32 gradients, and the 16-bit copies of the weights.

CUDA graphs read and write fixed addresses. So the buffers stay when a window's close clears
`.grad`, and become `.grad` again at the next window's first micro-step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wholebatch.gradients import DeviceStore
from wholebatch.precision import SIXTEEN_BIT

if TYPE_CHECKING:
    from wholebatch.window import Window

__all__ = [
    "Casts",
    "Gradients",
    "buffer_dtype",
    "eager_into",
    "empty_cache",
    "may_lend",
    "take_workspace",
]

_ALIGNED = 256
"""Elements; every tensor of a piece begins where kernels can read it in wide words."""


def buffer_dtype(parameter: Tensor) -> torch.dtype:
    """Gradients of 16-bit parameters are added in fp32, all others in their own dtype."""
    return torch.float32 if parameter.dtype in SIXTEEN_BIT else parameter.dtype


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
    # `.data`: each counts its own changes, not those of the whole piece.
    return [
        pieces[dtype].as_strided(tensor.shape, _dense_strides(tensor), start).data
        for tensor, dtype, start in zip(like, dtypes, starts, strict=True)
    ]


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Its strides where they leave no gaps, else those that `empty_like` would choose."""
    return torch.empty_like(tensor, device="meta").stride()


def empty_cache(device: torch.device) -> None:
    """What is free goes back to the driver, so that what comes next lies in no gap of it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def may_lend(model: nn.Module, window: Window) -> bool:
    """Whether eager code may add into buffers from the start.

    Not where ranks must know who has no gradient, nor where a layer gives sparse gradients or an
    optimizer takes no others: added to a buffer they would be dense.
    """
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules()) or any(
        isinstance(optimizer, torch.optim.SparseAdam) for optimizer in window.target.optimizers
    )
    return window.sync.ranks == 1 and type(window.store) is DeviceStore and not sparse


@contextmanager
def eager_into(gradients: Gradients, window: Window) -> Iterator[None]:
    """Within it, eager code adds into the buffers, if it may and there are some."""
    store = window.store
    if not gradients.lends or not isinstance(store, DeviceStore):
        yield
        return
    if window.is_open:
        gradients.lend()
    else:
        store.opened = gradients.lend
    try:
        yield
    finally:
        store.opened = None
        gradients.take_back()


def take_workspace(device: torch.device) -> None:
    """Let the products of backwards take their workspace now, where it is in nobody's way.

    Autograd's thread has a workspace of its own, taken at its first product and kept: among the
    activations of a backward it would hold on to all of the memory around it.
    """
    if device.type != "cuda":
        return
    with suppress(RuntimeError), torch.enable_grad():  # deterministic algorithms may refuse it
        one = torch.zeros(16, 16, device=device, requires_grad=True)
        (one @ one).sum().backward()


class Gradients:
    """One buffer for each parameter that ever had a gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._buffers: dict[int, Tensor] = {}
        self._entered: tuple[int, ...] = ()
        self.lends = False
        """Whether eager code is to add into the buffers too."""
        self._lent: dict[int, int] = {}  # buffers that eager code may add into: their versions

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

    @torch.no_grad()
    def lend(self) -> None:
        """Empty buffers become `.grad` where there is none, for eager code to add into.

        Left to itself autograd would make a second set of gradients beside them.
        """
        some = {i: b for i, b in self._buffers.items() if self.parameters[i].grad is None}
        if some:
            torch._foreach_zero_(list(some.values()))
        for index, buffer in some.items():
            self.parameters[index].grad = buffer
            self._lent[index] = buffer._version

    def take_back(self) -> None:
        """Where nothing was added there is no gradient again, as autograd would have left it."""
        for index, version in self._lent.items():
            parameter, buffer = self.parameters[index], self._buffers[index]
            if parameter.grad is buffer and buffer._version == version:
                parameter.grad = None
        self._lent.clear()

    def set_aside(self, used: Sequence[int]) -> list[Tensor | None]:
        """Copies of what `.grad` of these parameters holds, on the host."""
        held = [self.parameters[index].grad for index in used]
        return [None if one is None else one.detach().to("cpu", copy=True) for one in held]

    def in_all(self) -> list[Tensor | None]:
        """Copies of what `.grad` of all parameters holds, on the host."""
        return self.set_aside(range(len(self.parameters)))

    @torch.no_grad()
    def put_back(self, used: tuple[int, ...], held: Sequence[Tensor | None]) -> None:
        """These numbers (or zero) into the buffers, and the buffers in place."""
        for index, buffer, numbers in zip(used, self.of(used), held, strict=True):
            if numbers is None:
                buffer.zero_()
            else:
                buffer.copy_(numbers)
            self.parameters[index].grad = buffer
        self._entered = used

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
