"""A measured correction of predictions, mostly for the workspaces of convolutions.

A kernel's own scratch memory is not a tensor, so a prediction misses it: little for transformers,
a tenth for a small ResNet. It grows about linearly with the micro-batch, so two smaller steps
determine it. On an H200, at up to four times the larger step, this was within 3% for a ViT and 5%
for CNNs; at eight times, one CNN was 19% off. Buffers, random generators and gradients are restored
after the steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.core.forward_state import ForwardState
from wholebatch.core.splitting import to_device
from wholebatch.core.splitting.samples import Static
from wholebatch.memory.choose_micro_batch import Choice, choose_micro_batch
from wholebatch.memory.meter import MemoryMeter
from wholebatch.memory.predict import CUDA_WORKSPACES, PlainWindow, predict_peak
from wholebatch.memory.resized_batches import map_tensors, resize_batch

__all__ = ["Correction", "calibrate", "choose_on_device", "measure_step"]


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
        """Return the corrected peak."""
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
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    most: int | None = None,
    static: Static = (),
    gradients: str = "device",
    noise: bool = False,
) -> Choice:
    """Run `choose_micro_batch`, corrected by two smaller steps on the model's device.

    The steps are a quarter and half of the size that was predicted to fit, so that they do not run
    out of memory. On the CPU nothing is measured: there the prediction is exact.
    """
    options: dict[str, Any] = {
        "budget": budget,
        "optimizer": optimizer,
        "precision": precision,
        "most": most,
        "static": static,
        "gradients": gradients,
        "noise": noise,
    }
    choice = choose_micro_batch(model, loss, batch, **options)
    on_cuda = next(model.parameters()).device.type == "cuda"
    if not choice.fits or choice.micro_batch < 2 or not on_cuda:
        return choice
    half = choice.micro_batch // 2
    correct = calibrate(
        model,
        loss,
        batch,
        precision=precision,
        samples=(max(1, half // 2), half),
        static=static,
    )
    return choose_micro_batch(model, loss, batch, correct=correct, **options)


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
            torch.clear_autocast_cache()
            gc.collect()
            torch.cuda.empty_cache()
            # cuBLAS keeps its workspaces. Free them, because the prediction counts them as new.
            torch._C._cuda_clearCublasWorkspaces()
            start = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            window.run([to_device(micro, device)] * micro_batches)
            torch.cuda.synchronize(device)
            used = torch.cuda.max_memory_allocated(device) - start
            if then is not None:
                then()
            return used
        with MemoryMeter(model=model, limit=limit) as meter:
            start = meter.current
            window.run([micro] * micro_batches)
            if then is not None:
                then()
        return meter.peak - start
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        before.restore()
        gc.collect()
