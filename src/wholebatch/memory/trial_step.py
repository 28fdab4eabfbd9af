"""Real steps on the model's device whose effects are undone: they correct and test predictions.

A kernel's own scratch memory is not a tensor, so a prediction misses it: little for transformers, a
tenth for a small ResNet. It grows about linearly with the micro-batch, so two smaller steps
determine it (`calibrate`). On an H200, at up to four times the larger step, this was within 3% for
a ViT and 5% for CNNs; at eight times, one CNN was 19% off.

A step at the chosen size tests a prediction before training begins (`try_out`). If the size does
not fit after all, it is reduced here, and not in the middle of a run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch import batch_size_of, to_device
from wholebatch.batch.samples import Static
from wholebatch.memory.choose_micro_batch import Choice, choose_micro_batch, resize_batch
from wholebatch.memory.fake_tensors import map_tensors
from wholebatch.memory.meter import MemoryMeter, free_caches, storage_id, tensors_in
from wholebatch.memory.plain_window import PlainWindow
from wholebatch.memory.predict import CUDA_WORKSPACES, predict_peak
from wholebatch.window.forward_state import ForwardState

_SMALLER = 7 / 8
_MOST_TRIALS = 24  # An eighth less each time: down to a twentieth of the predicted size.
_FULL = 0.97
_WORTH_IT = 1.03


@dataclass(frozen=True)
class Correction:
    """The measured bytes beyond the prediction: `constant + per_sample × samples`.

    It can be negative, if a library keeps smaller workspaces than assumed.
    """

    constant: float
    per_sample: float
    measured: dict[int, int]
    """The measured bytes beyond the prediction, by samples."""

    def __call__(self, samples: int, peak: int) -> int:
        return peak + round(self.constant + self.per_sample * samples)


def calibrate(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    precision: str = "full",
    samples: tuple[int, int] = (1, 2),
    static: Static = (),
) -> Correction:
    """Measure two small steps on the model's device, and compare them with their predictions."""
    beyond: dict[int, int] = {}
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    for size in samples:
        # Copy it: a view would hold the whole batch.
        micro = map_tensors(resize_batch(batch, size, static=static), torch.clone)
        used = measure_step(model, loss, micro, precision=precision)
        predicted = predict_peak(model, loss, micro, precision=precision).peak - held
        # Of the predicted bytes, only the libraries' workspaces may turn out to be unused.
        beyond[size] = max(used - predicted, -CUDA_WORKSPACES)
    (small, low), (large, high) = sorted(beyond.items())[0], sorted(beyond.items())[-1]
    slope = max(0.0, (high - low) / (large - small)) if large > small else 0.0
    # Growth faster than proportional to the micro-batch is a jump, not a slope.
    slope = min(slope, max(0.0, high) / large) if low > 0 else slope
    return Correction(high - slope * large, slope, beyond)


def choose_on_device(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    budget: int,
    precision: str = "full",
    static: Static = (),
    **options: Any,
) -> Choice:
    """Run `choose_micro_batch` with its options, corrected by two steps on the model's device.

    The steps are a quarter and half of the size that was predicted to fit, so that they do not run
    out of memory. On the CPU nothing is measured: there the prediction is exact.
    """
    how: dict[str, Any] = {"precision": precision, "static": static}
    choice = choose_micro_batch(model, loss, batch, budget=budget, **how, **options)
    on_cuda = next(model.parameters()).device.type == "cuda"
    if not choice.fits or choice.micro_batch < 2 or not on_cuda:
        return choice
    half = choice.micro_batch // 2
    correct = calibrate(model, loss, batch, samples=(max(1, half // 2), half), **how)
    return choose_micro_batch(model, loss, batch, budget=budget, correct=correct, **how, **options)


def measure_step(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    micro: Any,
    *,
    precision: str = "full",
    micro_batches: int = 2,
    limit: int | None = None,
    then: Callable[[], None] | None = None,
) -> int:
    """Run micro-batches like this one and return the bytes used beyond those already allocated.

    No update is made; `then` is called in its place, while the gradients exist. CUDA's allocator
    gives the number; elsewhere the meter does, and more than `limit` bytes raise
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
            # cuBLAS keeps its workspaces. Free them, because the prediction counts them as new.
            torch._C._cuda_clearCublasWorkspaces()
            start = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            window.run([to_device(micro, device)] * micro_batches)
            torch.cuda.synchronize(device)
            used = torch.cuda.max_memory_allocated(device) - start
        else:
            with MemoryMeter(model=model, limit=limit) as meter:
                start = meter.current
                window.run([micro] * micro_batches)
            used = meter.peak - start
        if then is not None:
            then()
        return used
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        before.restore()
        gc.collect()


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
        partial(measure_step, model, loss, precision=precision),
        partial(resize_batch, batch, static=static),
        # State that does not exist yet: allocate it on CUDA, and lower the limit on the CPU.
        kept=max(0, state - _state_bytes(optimizer)),
        limit=choice.budget - state,
    )
    begin = _first_size(choice) if trial.on_cuda else choice.micro_batch
    found = _first_fitting(trial, choice, begin)
    if found is None:
        failed = (*choice.failed, *trial.failed)
        return replace(choice, micro_batch=1, measured=None, failed=failed, is_whole_batch=False)
    size, used = found
    if size == begin < choice.micro_batch:
        chosen = _by_the_slope(size, trial.reserved, choice)
        if chosen > size:
            size, used = trial.tried(chosen) or found
    if not (choice.failed or trial.failed):
        most = batch_size_of(batch, static=static) if most is None else most
        # As if all memory grew with the size: too small rather than too large.
        full = int(size * _FULL * choice.budget / trial.reserved) if trial.reserved else size
        larger = min(most, full)
        if larger > size * _WORTH_IT:
            size, used = trial.tried(larger) or (size, used)
    trial.end()
    return replace(
        choice,
        micro_batch=size,
        measured=held_bytes(model, optimizer) + trial.kept + used,
        failed=(*choice.failed, *trial.failed),
        is_whole_batch=choice.is_whole_batch and size == choice.micro_batch,
    )


def _first_fitting(trial: _Trial, choice: Choice, size: int) -> tuple[int, int] | None:
    """Return the first size that fits, from `size` downwards, and its bytes; None if none does."""
    for _ in range(_MOST_TRIALS):
        is_whole = choice.is_whole_batch and size == choice.micro_batch
        found = trial.tried(size, micro_batches=1 if is_whole else 2)
        if found is not None or size == 1:
            return found
        size = _smaller(size)
    return None


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


@dataclass
class _Trial:
    """Steps on a model's device whose effects are undone.

    On CUDA, optimizer state that does not exist yet is allocated as a first update would: in as
    many pieces, in the gaps that a first backward leaves. As one piece it could fit where the
    real state does not.
    """

    model: torch.nn.Module
    measure: Callable[..., int]
    """`measure_step` for this model and loss."""
    batch_of: Callable[[int], Any]
    kept: int
    limit: int
    failed: list[int] = field(default_factory=list)
    """The sizes that ran out of memory."""
    reserved: int = 0
    """The bytes that CUDA's allocator reserved at the peak of the last step; else 0."""

    def __post_init__(self) -> None:
        self._device = next(self.model.parameters()).device
        self._state: list[Tensor] = []
        self.on_cuda = self._device.type == "cuda"

    def tried(self, size: int, *, micro_batches: int = 2) -> tuple[int, int] | None:
        """Return this size and the bytes of its step; None if it runs out of memory."""
        used = self.run(size, micro_batches=micro_batches)
        if used is None:
            self.failed.append(size)
        return None if used is None else (size, used)

    def run(self, size: int, *, micro_batches: int) -> int | None:
        """Run a step of this size and return the bytes used, or None if it ran out of memory."""
        # Copy it: a view would hold the whole batch.
        micro = map_tensors(self.batch_of(size), torch.clone)
        self.end()
        used: int | None = None
        limit = None if self.on_cuda else self.limit
        with suppress(torch.OutOfMemoryError):
            if self.on_cuda and self.kept:
                self.measure(micro, micro_batches=1, then=self._take_state)
            used = self.measure(micro, micro_batches=micro_batches, limit=limit)
        self._state.clear()
        if self.on_cuda and used is not None:
            self.reserved = torch.cuda.max_memory_reserved(self._device)
        return used

    def _take_state(self) -> None:
        """Allocate memory for the optimizer's state, parameter by parameter."""
        parameters = list(self.model.parameters())
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
        free_caches()


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer state."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [] if optimizer is None else tensors_in(optimizer.state.values())
    return _bytes_of((*parameters, *model.buffers(), *gradients, *state), parameters)


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return _bytes_of(tensors_in(optimizer.state.values()), parameters)


def _bytes_of(tensors: Iterable[Tensor], parameters: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors on the parameters' device, counting each storage once."""
    kind = parameters[0].device.type if parameters else "cpu"
    storages = [t.untyped_storage() for t in tensors if t.device.type == kind and not t.is_sparse]
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())
