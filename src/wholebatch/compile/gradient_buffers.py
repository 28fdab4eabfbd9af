"""Buffers that outlive a window: the fp32 gradients, and the 16-bit copies of the weights.

CUDA graphs read and write fixed addresses. So the buffers are kept when the close of a window
clears `.grad`, and become `.grad` again at the first micro-step of the next window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.window.autograd_graph import version_of
from wholebatch.window.precision import SIXTEEN_BIT

Cast: TypeAlias = tuple[int, torch.dtype]
"""A parameter's number, and the dtype of its copy."""

ALIGNED = 64
"""The alignment of each tensor in a shared allocation, in elements, for vectorised loads."""


def in_one_piece(
    like: Sequence[Tensor], dtypes: Sequence[torch.dtype], device: torch.device | None = None
) -> list[Tensor]:
    """Return zeros of these shapes and strides, with one allocation for each dtype.

    All matrices come first, so that those of one layer lie one behind the other (`as_one`).
    Allocated one by one, they would fill the gaps left by freed activations, and the caching
    allocator could not release the segments around them.
    """
    places: dict[torch.dtype, int] = {}
    starts = [0] * len(like)
    for number in sorted(range(len(like)), key=lambda number: like[number].dim() < 2):
        dtype = dtypes[number]
        starts[number] = places.get(dtype, 0)
        places[dtype] = starts[number] + -(-like[number].numel() // ALIGNED) * ALIGNED
    if not like:
        return []
    device = device or like[0].device
    pieces = {
        dtype: torch.zeros(length, dtype=dtype, device=device) for dtype, length in places.items()
    }
    # `.data` gives each tensor a version counter of its own, apart from the whole allocation's.
    # Strides that leave gaps become those that `empty_like` chooses.
    strides = [torch.empty_like(tensor, device="meta").stride() for tensor in like]
    return [
        pieces[dtype].as_strided(tensor.shape, stride, start).data
        for tensor, dtype, start, stride in zip(like, dtypes, starts, strides, strict=True)
    ]


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the rows of all parts as one tensor, if they lie one behind the other in memory."""
    first, *_ = parts
    end = first.storage_offset()
    for part in parts:
        apart = part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if apart or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride()).data


def empty_cache(device: torch.device) -> None:
    """Return free memory to the driver, so that the next allocations do not fill its gaps."""
    if device.type == "cuda":
        # An autocast around `Accumulator.run` keeps casts of weights among freed activations.
        torch.clear_autocast_cache()
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Return the memory that the driver, and the allocator's own limit, have left."""
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free, limit - torch.cuda.memory_reserved(device))


def is_nearly_full(device: torch.device) -> bool:
    """True if less memory is free than what is reserved for the micro-steps."""
    return free_memory(device) < torch.cuda.memory_reserved(device)


def room_for(tensors: Sequence[Tensor]) -> torch.device:
    """Return the tensors' device if it has room for copies beside a micro-step, else the CPU.

    To host memory and back, the gradients of 1.1 billion parameters take seconds.
    """
    if tensors and tensors[0].is_cuda:
        device, now = tensors[0].device, torch.cuda.memory_allocated(tensors[0].device)
        free = free_memory(device) + torch.cuda.memory_reserved(device) - now
        needed = (
            sum(tensor.nbytes for tensor in tensors) + torch.cuda.max_memory_allocated(device) - now
        )
        if 2 * needed < free:  # Twice, since free memory is in pieces.
            return device
    return torch.device("cpu")


@contextmanager
def eager_into(gradients: Gradients, window: Any) -> Iterator[None]:
    """Let eager code add into the buffers within this context, if that is allowed."""
    if not gradients.lends:
        yield
        return
    store = window.store
    if window.open is not None:
        gradients.lend()
    else:
        store.opened = gradients.lend
    try:
        yield
    finally:
        store.opened = None
        gradients.take_back()


def take_workspace(device: torch.device) -> None:
    """Make autograd's thread allocate its cuBLAS workspace now.

    The workspace is allocated at the thread's first matrix product and kept. Allocated in the
    middle of a backward, it would pin the segment of activations around it.
    """
    if device.type != "cuda":
        return
    with suppress(RuntimeError), torch.enable_grad():  # Deterministic algorithms may refuse it.
        ones = torch.zeros(16, 16, device=device, requires_grad=True)
        (ones @ ones).sum().backward()


class Gradients:
    """The gradient buffers: one for each parameter that ever had a gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._buffers: dict[int, Tensor] = {}
        self._entered: tuple[int, ...] = ()
        self.lends = False
        """True if eager code adds into the buffers too."""
        self._lent: dict[int, int] = {}  # The version of each buffer that eager code may add into.

    def of(self, used: Sequence[int]) -> list[Tensor]:
        """Return the buffers of these parameters, and allocate those that are missing."""
        wanted = [index for index in used if index not in self._buffers]
        like = [self.parameters[index] for index in wanted]
        buffers = in_one_piece(
            like, [torch.float32 if p.dtype in SIXTEEN_BIT else p.dtype for p in like]
        )
        self._buffers.update(zip(wanted, buffers, strict=True))
        return [self._buffers[index] for index in used]

    def are_in_place(self, used: tuple[int, ...]) -> bool:
        """True if the buffers are these parameters' `.grad` now."""
        return self._entered == used and all(
            self.parameters[index].grad is self._buffers[index] for index in used
        )

    @torch.no_grad()
    def lend(self) -> None:
        """Zero the buffers of parameters without a gradient and make them `.grad`.

        Otherwise autograd would allocate a second set of gradients for eager code.
        """
        some = {i: b for i, b in self._buffers.items() if self.parameters[i].grad is None}
        if some:
            torch._foreach_zero_(list(some.values()))
        for index, buffer in some.items():
            self.parameters[index].grad = buffer
            self._lent[index] = version_of(buffer)

    def take_back(self) -> None:
        """Set `.grad` to None again where nothing was added, as autograd would have left it."""
        for index, version in self._lent.items():
            parameter, buffer = self.parameters[index], self._buffers[index]
            if parameter.grad is buffer and version_of(buffer) == version:
                parameter.grad = None
        self._lent.clear()

    def set_aside(self, used: Sequence[int]) -> list[Tensor | None]:
        """Return copies of these parameters' `.grad`, in host memory if the device is full."""
        held = [self.parameters[index].grad for index in used]
        place = room_for([gradient for gradient in held if gradient is not None])
        return [
            None if gradient is None else gradient.detach().to(place, copy=True)
            for gradient in held
        ]

    def take_in(self) -> None:
        """Move autograd's gradients into the buffers, unless one of them is sparse."""
        existing = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        if all(gradient.layout == torch.strided for _, gradient in existing):
            self.put_in_place(tuple(index for index, _ in existing))

    @torch.no_grad()
    def put_in_place(
        self, used: tuple[int, ...], held: Sequence[Tensor | None] | None = None
    ) -> None:
        """Make the buffers these parameters' `.grad`, and copy `held` (or zero) into them.

        By default these are the gradients that are there.
        """
        buffers = self.of(used)
        held = [self.parameters[index].grad for index in used] if held is None else held
        pairs = [(b, g) for b, g in zip(buffers, held, strict=True) if g is not b]
        empty = [buffer for buffer, gradient in pairs if gradient is None]
        filled = [(b, g.detach().to_dense()) for b, g in pairs if g is not None]
        if empty:
            torch._foreach_zero_(empty)
        if filled:
            torch._foreach_copy_([b for b, _ in filled], [g for _, g in filled])
        for index, buffer in zip(used, buffers, strict=True):
            self.parameters[index].grad = buffer
        self._entered = used


class Casts:
    """16-bit copies of the weights, made once per window and shared by all graphs."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._copies: dict[Cast, Tensor] = {}

    def of(self, wanted: Sequence[Cast]) -> list[Tensor]:
        """Return these copies, and make those that are missing."""
        new = [key for key in dict.fromkeys(wanted) if key not in self._copies]
        copies = in_one_piece([self._parameters[i] for i, _ in new], [dtype for _, dtype in new])
        self._copies.update(zip(new, copies, strict=True))
        if new:
            self.refresh()
        return [self._copies[key] for key in wanted]

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast all weights again, into the same memory: the weights have changed."""
        if self._copies:
            sources: list[Tensor] = [self._parameters[index] for index, _ in self._copies]
            torch._foreach_copy_(list(self._copies.values()), sources)
