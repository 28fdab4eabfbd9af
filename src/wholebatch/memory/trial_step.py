"""Real steps on the device whose effects are undone, to measure the memory of a size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch import to_device
from wholebatch.batch.samples import tensors_of
from wholebatch.memory.fake_tensors import map_tensors
from wholebatch.memory.meter import free_caches
from wholebatch.memory.plain_window import PlainWindow
from wholebatch.window.forward_state import ForwardState

_SPARE = 1 / 32
"""The share of the budget that stays free in a trial on CUDA.

Freed memory is never in the same pieces twice, so a later window may need a little more.
"""


def trial_peak(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    micros: Sequence[Any],
    *,
    optimizer: torch.optim.Optimizer | None,
    precision: str,
    budget: int,
    missing_state: int = 0,
) -> int | None:
    """Return the peak bytes on CUDA of a window of these micro-batches; None if it runs out.

    `missing_state` is the optimizer's state that the first update will create, in bytes. No update
    is made. Buffers, random generators and gradients are restored. Three windows run, because the
    allocator cannot use every piece of freed memory. They allocate as the first three of training
    do: at the end of the first, the missing state comes to lie beside its gradients, and the third
    begins with what the second has freed.
    """
    # Views would hold the batch.
    copies = {id(micro): map_tensors(micro, torch.clone) for micro in micros}
    micros = [copies[id(micro)] for micro in micros]
    device = next(model.parameters()).device
    before = ForwardState(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    spare: list[Tensor] = []
    state: list[Tensor] = []

    def loss_on_device(model: torch.nn.Module, micro: Any) -> Any:
        return loss(model, to_device(micro, device))

    def run() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        PlainWindow(model, loss_on_device, precision=precision).run(micros)

    try:
        free_caches()
        spare.append(torch.empty(int(_SPARE * budget), dtype=torch.uint8, device=device))
        torch.cuda.synchronize(device)
        start = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.empty_cache()
        state = state_pieces(list(model.parameters()), missing_state)
        run()
        run()
        torch.cuda.synchronize(device)
        used = int(torch.cuda.max_memory_allocated(device)) - start
    except torch.OutOfMemoryError:
        return None
    finally:
        spare.clear()
        state.clear()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        before.restore()
        free_caches()
    return held_bytes(model, optimizer) + used


def state_pieces(parameters: Sequence[Tensor], nbytes: int) -> list[Tensor]:
    """Allocate memory for an optimizer's state, parameter by parameter."""
    pieces: list[Tensor] = []
    share = nbytes / max(1, sum(parameter.nbytes for parameter in parameters))
    for parameter in parameters:
        left = int(parameter.nbytes * share)
        while left > 0:
            piece = min(left, parameter.nbytes)
            pieces.append(torch.empty(piece, dtype=torch.uint8, device=parameter.device))
            left -= piece
    return pieces


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer state."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [] if optimizer is None else tensors_of(list(optimizer.state.values()))
    return _bytes_of((*parameters, *model.buffers(), *gradients, *state), parameters)


def _bytes_of(tensors: Iterable[Tensor], parameters: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors on the parameters' device, counting each storage once."""
    kind = parameters[0].device.type if parameters else "cpu"
    storages = [t.untyped_storage() for t in tensors if t.device.type == kind and not t.is_sparse]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())
