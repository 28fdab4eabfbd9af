"""One real micro-step at the size that was chosen, whose effects are undone.

A prediction says what will fit; this shows it, before anything is trained. If it does not fit after
all, the size is made smaller here, and not in the middle of a run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.memory.batches import map_tensors, resize_batch
from wholebatch.memory.calibrate import measure_step
from wholebatch.memory.choose import Choice
from wholebatch.splitting.layout import Static

__all__ = ["held_bytes", "try_out"]

_SMALLER = 7 / 8
_MOST_TRIALS = 24  # an eighth less each time: down to a twentieth of what was predicted


def try_out(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    choice: Choice,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    static: Static = (),
) -> Choice:
    """The choice, or a smaller one, that a real step within the budget has gone through with.

    Two micro-batches run forward and backward (one, where it is the whole batch). Room is kept for
    what the first update will make: the optimizer's state. Buffers, random generators and
    gradients are as they were afterwards. `choice.measured` says what it took; None: nothing fits.
    """
    device = next(model.parameters()).device
    held = held_bytes(model, optimizer)
    state = choice.prediction.by_category["optimizer state"]
    to_come = max(0, state - _state_bytes(optimizer))
    size, failed = choice.micro_batch, list(choice.failed)
    for _ in range(_MOST_TRIALS):
        # Copied: a view would bring all of the batch that it is cut from.
        micro = map_tensors(resize_batch(batch, size, static=static), torch.clone)
        used = _used(
            model,
            loss,
            micro,
            precision=precision,
            micro_batches=1 if choice.is_whole_batch and size == choice.micro_batch else 2,
            kept=to_come,
            limit=None if device.type == "cuda" else choice.budget - state,
            device=device,
        )
        if used is not None:
            return replace(
                choice,
                micro_batch=size,
                measured=held + to_come + used,
                failed=tuple(failed),
                is_whole_batch=choice.is_whole_batch and size == choice.micro_batch,
            )
        failed.append(size)
        _release()
        if size == 1:
            break
        size = max(1, min(size - 1, int(size * _SMALLER)))
    return replace(choice, micro_batch=1, measured=None, failed=tuple(failed), is_whole_batch=False)


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """What a run holds between two updates: parameters, buffers, gradients, optimizer state."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [] if optimizer is None else list(_tensors(optimizer.state.values()))
    return _bytes_of((*parameters, *model.buffers(), *gradients, *state), _place(parameters))


def _used(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    micro: Any,
    *,
    precision: str,
    micro_batches: int,
    kept: int,
    limit: int | None,
    device: torch.device,
) -> int | None:
    """The bytes that the step took; None where it ran out of memory."""
    try:
        # The state that is not there yet takes its place: on a device, by being there.
        place = torch.empty(kept, dtype=torch.uint8, device=device) if limit is None else None
        used = measure_step(
            model, loss, micro, precision=precision, micro_batches=micro_batches, limit=limit
        )
        del place
        return used
    except torch.OutOfMemoryError:
        return None


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return _bytes_of(_tensors(optimizer.state.values()), _place(parameters))


def _place(parameters: list[Any]) -> str:
    return str(parameters[0].device.type) if parameters else "cpu"


def _bytes_of(tensors: Iterable[Tensor], kind: str) -> int:
    """Each storage once: tied weights and views share one."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == kind and not t.is_sparse
    }
    return sum(storages.values())


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
