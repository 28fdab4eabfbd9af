"""Real steps on the device whose effects are undone, to measure the memory of a size."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch import to_device
from wholebatch.memory.fake_tensors import map_tensors
from wholebatch.memory.meter import MemoryMeter, free_caches, storage_id, tensors_in
from wholebatch.memory.plain_window import PlainWindow
from wholebatch.window.forward_state import ForwardState


def measure_step(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    micro: Any,
    *,
    precision: str = "full",
    micro_batches: int = 2,
    limit: int | None = None,
) -> int:
    """Run micro-batches like this one and return the bytes used beyond those already allocated.

    No update is made. Buffers, random generators and gradients are restored. CUDA's allocator gives
    the number; elsewhere the meter does, and more than `limit` bytes raise
    `torch.OutOfMemoryError`.
    """
    device = next(model.parameters()).device
    before = ForwardState(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    window = PlainWindow(model, loss, precision=precision)
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            free_caches()
            start = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            window.run([to_device(micro, device)] * micro_batches)
            torch.cuda.synchronize(device)
            return int(torch.cuda.max_memory_allocated(device)) - start
        with MemoryMeter(model=model, limit=limit) as meter:
            start = meter.current
            window.run([micro] * micro_batches)
        return meter.peak - start
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        before.restore()
        gc.collect()


@dataclass(eq=False)
class TrialSteps:
    """Steps of any size, in a device that also holds the optimizer's state.

    `missing_state` is what the first update will create, in bytes. On CUDA it is allocated as that
    update does: in as many pieces, in the gaps that a first backward leaves. As one piece it could
    fit where the real state does not.
    """

    model: torch.nn.Module
    loss: Callable[[Any, Any], Any]
    optimizer: torch.optim.Optimizer | None
    precision: str
    budget: int
    missing_state: int = 0
    _state: list[Tensor] = field(default_factory=list)

    def peak(self, micro: Any, *, micro_batches: int = 2) -> int | None:
        """Return the peak bytes of a step with micro-batches like this; None if out of memory."""
        micro = map_tensors(micro, torch.clone)  # A view would hold the whole batch.
        on_cuda = next(self.model.parameters()).device.type == "cuda"
        held = held_bytes(self.model, self.optimizer) + self.missing_state
        how: dict[str, Any] = {"precision": self.precision}
        try:
            if on_cuda and self.missing_state:
                measure_step(self.model, self.loss, micro, micro_batches=1, **how)
                self._take_state()
            if not on_cuda:
                how["limit"] = max(0, self.budget - self.missing_state)
            used = measure_step(self.model, self.loss, micro, micro_batches=micro_batches, **how)
            return held + used
        except torch.OutOfMemoryError:
            return None
        finally:
            self._state.clear()
            free_caches()

    def _take_state(self) -> None:
        """Allocate memory for the optimizer's state, parameter by parameter."""
        parameters = list(self.model.parameters())
        share = self.missing_state / max(1, sum(parameter.nbytes for parameter in parameters))
        for parameter in parameters:
            left = int(parameter.nbytes * share)
            while left > 0:
                piece = min(left, parameter.nbytes)
                self._state.append(torch.empty(piece, dtype=torch.uint8, device=parameter.device))
                left -= piece


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer state."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [] if optimizer is None else tensors_in(optimizer.state.values())
    return _bytes_of((*parameters, *model.buffers(), *gradients, *state), parameters)


def _bytes_of(tensors: Iterable[Tensor], parameters: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors on the parameters' device, counting each storage once."""
    kind = parameters[0].device.type if parameters else "cpu"
    storages = [t.untyped_storage() for t in tensors if t.device.type == kind and not t.is_sparse]
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())
