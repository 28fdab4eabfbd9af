"""A real step at the chosen size, whose effects are undone.

It tests a prediction before training begins. If the size does not fit after all, it is reduced
here, and not in the middle of a run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.core.splitting import batch_size_of
from wholebatch.core.splitting.samples import Static
from wholebatch.memory.choose_micro_batch import Choice
from wholebatch.memory.prediction_correction import measure_step
from wholebatch.memory.resized_batches import map_tensors, resize_batch

__all__ = ["held_bytes", "try_out"]

_SMALLER = 7 / 8
_MOST_TRIALS = 24  # An eighth less each time: down to a twentieth of the predicted size.
_FULL = 0.97
_WORTH_IT = 1.03


def try_out(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    choice: Choice,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    static: Static = (),
    most: int | None = None,
) -> Choice:
    """Run real steps within the budget, and return the choice, or a smaller one, that fits.

    Two micro-batches run forward and backward (one, if it is the whole batch). Room is kept for the
    optimizer's state, which the first update creates. Buffers, random generators and gradients are
    restored. `choice.measured` is the bytes used, or None if nothing fits. On CUDA a prediction
    must leave room for fragmentation, so a larger size is tried too if the allocator has room.
    """
    state = choice.prediction.by_category["optimizer state"]
    trial = _Trial(
        model,
        loss,
        batch,
        precision=precision,
        static=static,
        # State that does not exist yet: allocate it on CUDA, and lower the limit on the CPU.
        kept=max(0, state - _state_bytes(optimizer)),
        limit=choice.budget - state,
    )
    base = held_bytes(model, optimizer) + trial.kept
    size, failed = choice.micro_batch, list(choice.failed)
    begin = _first_size(choice) if trial.on_cuda else size
    used = None
    at = begin
    for _ in range(_MOST_TRIALS):
        is_whole = choice.is_whole_batch and at == choice.micro_batch
        used = trial.run(at, micro_batches=1 if is_whole else 2)
        if used is not None:
            break
        failed.append(at)
        if at == 1:
            break
        at = _smaller(at)
    if used is not None and at == begin < size:
        chosen = _by_the_slope(at, trial.reserved, choice)
        more = trial.run(chosen, micro_batches=2) if chosen > at else None
        if more is not None:
            at, used = chosen, more
        elif chosen > at:
            failed.append(chosen)
    size = at
    if used is None:
        return replace(
            choice, micro_batch=1, measured=None, failed=tuple(failed), is_whole_batch=False
        )
    most = batch_size_of(batch, static=static) if most is None else most
    larger = _larger(size, trial.reserved, choice.budget, most=most) if not failed else size
    if larger > size * _WORTH_IT:
        more = trial.run(larger, micro_batches=2)
        if more is None:
            failed.append(larger)
        else:
            size, used = larger, more
    trial.end()
    return replace(
        choice,
        micro_batch=size,
        measured=base + used,
        failed=tuple(failed),
        is_whole_batch=choice.is_whole_batch and size == choice.micro_batch,
    )


def _first_size(choice: Choice) -> int:
    """Return a slightly smaller size to begin with: its memory shows if the choice will fit."""
    size = choice.micro_batch
    known = [other for other in choice.tried if other < size]
    return size if choice.is_whole_batch or not known else _smaller(size)


def _smaller(size: int) -> int:
    return max(1, min(size - 1, int(size * _SMALLER)))


def _by_the_slope(size: int, reserved: int, choice: Choice) -> int:
    """Return the largest size, up to the choice, that fits by the slope of the predictions.

    It starts from a smaller step that has run. If the allocator's cache has filled the budget, its
    number tells nothing, and the choice itself is returned.
    """
    room = _FULL * choice.budget - reserved
    if room <= 0:
        return choice.micro_batch
    below = max(other for other in choice.tried if other < choice.micro_batch)
    grown = choice.tried[choice.micro_batch] - choice.tried[below]
    slope = grown / (choice.micro_batch - below)
    return min(choice.micro_batch, size + int(room / slope)) if slope > 0 else choice.micro_batch


def _larger(size: int, reserved: int, budget: int, *, most: int) -> int:
    """Return the size that would fill the budget, if all memory grew with the size.

    Some of it does not grow, so the estimate is too small rather than too large.
    """
    return min(most, int(size * _FULL * budget / reserved)) if reserved else size


class _Trial:
    """Steps on a model's device whose effects are undone.

    On CUDA, optimizer state that does not exist yet is allocated as a first update would: in as
    many pieces, in the gaps that a first backward leaves. As one piece it could fit where the
    real state does not.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        batch: Any,
        *,
        precision: str,
        static: Static,
        kept: int,
        limit: int,
    ) -> None:
        self._model = model
        self._loss = loss
        self._batch = batch
        self._precision = precision
        self._static = static
        self._limit = limit
        self._device = next(model.parameters()).device
        self._state: list[Tensor] = []
        self.on_cuda = self._device.type == "cuda"
        self.kept = kept
        self.reserved = 0
        """The bytes that CUDA's allocator reserved at the peak of the last step; else 0."""

    def run(self, size: int, *, micro_batches: int) -> int | None:
        """Run a step of this size and return the bytes used, or None if it ran out of memory."""
        # Copy it: a view would hold the whole batch.
        micro = map_tensors(resize_batch(self._batch, size, static=self._static), torch.clone)
        self.end()
        options: dict[str, Any] = {"precision": self._precision}
        try:
            if self.on_cuda and self.kept:
                then = self._take_state
                measure_step(self._model, self._loss, micro, micro_batches=1, then=then, **options)
            used = measure_step(
                self._model,
                self._loss,
                micro,
                micro_batches=micro_batches,
                limit=None if self.on_cuda else self._limit,
                **options,
            )
        except torch.OutOfMemoryError:
            used = None
        self._state.clear()
        if self.on_cuda and used is not None:
            self.reserved = torch.cuda.max_memory_reserved(self._device)
        return used

    def _take_state(self) -> None:
        """Allocate memory for the optimizer's state, parameter by parameter."""
        parameters = list(self._model.parameters())
        share = self.kept / max(1, sum(parameter.nbytes for parameter in parameters))
        for parameter in parameters:
            left = int(parameter.nbytes * share)
            while left > 0:
                piece = min(left, parameter.nbytes)
                self._state.append(torch.empty(piece, dtype=torch.uint8, device=self._device))
                left -= piece

    def end(self) -> None:
        """Free the memory that steps have left in caches."""
        self._state.clear()
        gc.collect()
        if self.on_cuda:
            torch.clear_autocast_cache()
            torch.cuda.empty_cache()


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer state."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [] if optimizer is None else list(_tensors(optimizer.state.values()))
    return _bytes_of((*parameters, *model.buffers(), *gradients, *state), _place(parameters))


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return _bytes_of(_tensors(optimizer.state.values()), _place(parameters))


def _place(parameters: list[Any]) -> str:
    return str(parameters[0].device.type) if parameters else "cpu"


def _bytes_of(tensors: Iterable[Tensor], kind: str) -> int:
    """Return the bytes of the tensors, counting each storage once."""
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
