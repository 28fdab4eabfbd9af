"""Parameters in buckets: their memory as one row, and optimizer steps on one bucket at a time.

Nearly every optimizer treats each parameter by itself, from that parameter's own gradient and
state, so stepping them one after the other makes the same update. An optimizer that computes
across parameters (a step size from the norm over all of them) is found by a small experiment, and
refused.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wholebatch.distributed import Sync
from wholebatch.distributed.ddp import in_buckets
from wholebatch.errors import UnsupportedError
from wholebatch.window.close import read_scalars
from wholebatch.window.gradient_store import refuse_foreign_code
from wholebatch.window.precision import SIXTEEN_BIT

BUCKET_BYTES = {**dict.fromkeys(("host", "swap", "moments"), 64 * 2**20), "release": 32 * 2**20}
"""The largest bucket, by the place of the gradients."""
_SMALLEST_BUCKET = 2**18

T = TypeVar("T")
S = TypeVar("S")

# Buckets


def bucket_bytes(parameters: Iterable[Tensor], most: int) -> int:
    """Return the size of a bucket: a sixteenth of all gradients, so that small models gain too."""
    total = sum(p.numel() * max(4, p.element_size()) for p in parameters)
    return min(most, max(_SMALLEST_BUCKET, total // 16))


def one_ahead(items: Iterable[T], start: Callable[[T], S]) -> Iterator[S]:
    """Yield `start(item)` for each item, with the next one started already.

    Two are alive at most, if the caller deletes what it was given before it asks for the next.
    """
    started: deque[S] = deque()
    for item in items:
        started.append(start(item))
        if len(started) == 2:
            yield started.popleft()
    while started:
        yield started.popleft()


# Memory


def in_shape_of(parameter: Tensor, flat: Tensor) -> Tensor:
    """View a row in the shape of the parameter, in the parameter's order of memory."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride())


def flat_of(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient as one row, in the parameter's order of memory."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return gradient.reshape(-1)
    if gradient.stride() != parameter.stride():
        ordered = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device
        )
        gradient = ordered.copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements lie side by side in memory, in any order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def as_real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones; return other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sum_over_ranks(sync: Sync, rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the sums of these rows over the ranks, by one all-reduce."""
    flat = torch.cat(list(rows))
    real = as_real(flat)
    summed = sync.sum_tensor(real).view_as(real)
    if flat.is_complex():
        summed = torch.view_as_complex(summed)
    pieces: Sequence[Tensor] = summed.split([row.numel() for row in rows])
    return pieces


# Steps


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Make `optimizer.step()` step these parameters alone, each with its group's options."""
    mine = {id(parameter) for parameter in parameters}
    found = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in mine]
    try:
        yield
    finally:
        for group, all_of_them in zip(optimizer.param_groups, found, strict=True):
            group["params"] = all_of_them


@contextmanager
def in_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make several steps parts of one: hooks after a step run once, at the end."""
    hooks = HeldPostHooks(optimizer)
    try:
        yield
    finally:
        hooks.restore()
    hooks.run()


class HeldPostHooks:
    """The hooks after an optimizer's step, held back from now on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hooks = optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_post_hooks = OrderedDict()

    def restore(self) -> None:
        """Give the hooks back to the optimizer."""
        self._optimizer._optimizer_step_post_hooks = self._hooks

    def run(self) -> None:
        """Call the hooks once."""
        for hook in list(self._hooks.values()):
            hook(self._optimizer, (), {})


def check_parts(optimizers: Sequence[torch.optim.Optimizer], option: str) -> None:
    """Refuse optimizers that cannot step on a part of their parameters, with the reason."""
    refuse_foreign_code(optimizers, option)
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise UnsupportedError(
                f"{option} with {name}(capturable=True): its steps are not recorded as a graph "
                "here; leave capturable out"
            )
        if not type(optimizer).__module__.startswith("torch.optim.") and not _has_parts(optimizer):
            raise UnsupportedError(
                f"{option} with {name}: stepping one parameter after the other made another "
                "update than stepping all at once (it reckons across parameters), or its step "
                "failed on a small example; keep the gradients on the device"
            )


def _has_parts(optimizer: torch.optim.Optimizer) -> bool:
    """True if steps in parts end where steps on all parameters do, on a small example."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            at_once, parted = (_trained_like(optimizer, parted=parted) for parted in (False, True))
            return all(map(torch.equal, at_once, parted))
    except Exception:  # an unknown optimizer may raise anything, and then nothing is shown
        return False


def _trained_like(optimizer: torch.optim.Optimizer, *, parted: bool) -> list[Tensor]:
    """Return two small parameters after three steps of such an optimizer."""
    kind: Any = type(optimizer)
    like: Tensor = optimizer.param_groups[0]["params"][0]
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> Tensor:
        return torch.randn(4, 3, generator=generator).to(like.device, like.dtype) * scale

    parameters = [nn.Parameter(random(scale)) for scale in (1.0, 5.0)]
    made: torch.optim.Optimizer = kind(parameters, **optimizer.defaults)
    for _ in range(3):
        gradients = [random(scale) for scale in (0.1, 10.0)]
        for some in [[parameter] for parameter in parameters] if parted else [parameters]:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if any(parameter is one for one in some) else None
            with only(made, some):
                made.step()
    return [parameter.detach() for parameter in parameters]


_SLAB_BYTES = 2**28
_ROW = 256
_PIECE = 2**12 * _ROW


@dataclass(eq=False)
class Bucket:
    """Some parameters of one optimizer, dtype and device, with their sums in one row."""

    optimizer: int
    parameters: list[nn.Parameter]
    flat: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.parameters]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sums."""
        dtype = self.parameters[0].dtype
        return torch.float32 if dtype in SIXTEEN_BIT else dtype


class HostSums:
    """One sum for each parameter, in float32 or better; pinned where a CUDA device fills them.

    The memory is allocated once. `filled` are the ids of the parameters that have a sum in this
    window.
    """

    def __init__(self, optimizers: Sequence[Sequence[nn.Parameter]]) -> None:
        everyone = [p for parameters in optimizers for p in parameters]
        most = bucket_bytes(everyone, BUCKET_BYTES["host"])
        self.buckets = [
            Bucket(index, some)
            for index, parameters in enumerate(optimizers)
            for some in in_buckets(parameters, most)
        ]
        self.filled: set[int] = set()
        self._of: dict[int, Tensor] = {}
        slabs = _Slabs(sum(sum(b.sizes) * b.dtype.itemsize for b in self.buckets))
        for bucket in self.buckets:
            pinned = bucket.device.type == "cuda"
            bucket.flat = slabs.take(sum(bucket.sizes), bucket.dtype, pinned=pinned)
            rows = bucket.flat.split(bucket.sizes)
            self._of.update(zip(map(id, bucket.parameters), rows, strict=True))
        self.bytes = slabs.taken

    @classmethod
    def of(
        cls, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> HostSums:
        """Make sums for these parameters, in the optimizers' order."""
        mine = {id(parameter) for parameter in parameters}
        return cls(
            [
                [p for group in o.param_groups for p in group["params"] if id(p) in mine]
                for o in optimizers
            ]
        )

    def is_for(self, parameters: Sequence[nn.Parameter]) -> bool:
        """True if there are sums for exactly these parameters."""
        return len(parameters) == len(self._of) and all(id(p) in self._of for p in parameters)

    def flat(self, parameter: nn.Parameter) -> Tensor:
        """Return the sum of a parameter as one row, in the parameter's order of memory."""
        return self._of[id(parameter)]

    def shaped(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum in the parameter's shape, or None if it has none in this window."""
        if id(parameter) not in self.filled:
            return None
        return in_shape_of(parameter, self._of[id(parameter)])


class _Slabs:
    """Host memory in large pieces: pinning is slow, and rounds each piece up to a power of two."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._rest: dict[bool, Tensor] = {}
        self.taken = 0

    def take(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        size = -(-numel * dtype.itemsize // 64) * 64
        rest = self._rest.get(pinned)
        if rest is None or size > len(rest):
            fresh = max(size, min(_SLAB_BYTES, self._left + 64))
            rest = torch.empty(fresh, dtype=torch.uint8, pin_memory=pinned)
            self.taken += fresh
        self._rest[pinned] = rest[size:]
        self._left -= size
        return rest[: numel * dtype.itemsize].view(dtype)


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all gradients, in float64, from the norms of short rows.

    On the CPU the norm of a long float32 tensor loses digits with its length (4e-4 for a million
    equal numbers); short rows, added up in float64, keep them (2e-7) and are as fast.
    """
    total = math.hypot(*read_scalars([norm_of_row(_row(gradient)) for gradient in gradients]))
    if not math.isfinite(total):  # squares overflow in float32 where numbers do not
        wide = [torch.linalg.vector_norm(as_real(g), dtype=torch.float64) for g in gradients]
        total = math.hypot(*read_scalars(wide))
    return torch.tensor(total, dtype=torch.float64, device="cpu")


def norm_of_row(row: Tensor) -> Tensor:
    """Return the norm of a flat tensor, in float64."""
    row = as_real(row).flatten()
    if row.dtype is not torch.float32:
        wide: Tensor = torch.linalg.vector_norm(row, dtype=torch.float64)
        return wide
    even = row.numel() - row.numel() % _ROW
    norms = [
        torch.linalg.vector_norm(torch.linalg.vector_norm(piece.view(-1, _ROW), dim=1).double())
        for piece in row[:even].split(_PIECE)
        if piece.numel()
    ]
    norms.append(torch.linalg.vector_norm(row[even:], dtype=torch.float64))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _row(gradient: Tensor) -> Tensor:
    """Return the elements in any order, without a copy if they lie side by side."""
    if torch.ops.aten.is_non_overlapping_and_dense(gradient):
        return gradient.as_strided((gradient.numel(),), (1,))
    return gradient.reshape(-1)
