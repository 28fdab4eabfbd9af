"""What a prediction cannot know, measured in a small step: workspaces of convolutions, mostly.

A kernel's own scratch memory is no tensor, so a prediction misses it: little for transformers,
a tenth for a small ResNet. It grows with the micro-batch, about in a straight line, so two smaller
steps say it: within 3% for a ViT and 5% for CNNs on an H200 at up to four times the larger one;
at eight times one CNN was 19% off. The steps leave nothing behind: buffers, random generators and
gradients are as they were.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.forward_state import ForwardState
from wholebatch.memory.batches import map_tensors, resize_batch
from wholebatch.memory.choose import Choice, choose_micro_batch
from wholebatch.memory.meter import MemoryMeter
from wholebatch.memory.predict import CUDA_WORKSPACES, PlainWindow, predict_peak
from wholebatch.splitting import to_device
from wholebatch.splitting.layout import Static

__all__ = ["Correction", "calibrate", "choose_on_device", "measure_step"]


@dataclass(frozen=True)
class Correction:
    """What was measured beyond the prediction: `constant + per_sample × samples` bytes.

    Below zero too: a library that keeps smaller workspaces than was assumed.
    """

    constant: float
    per_sample: float
    measured: dict[int, int]
    """The measured bytes beyond the prediction, by samples."""

    def __call__(self, samples: int, peak: int) -> int:
        """A predicted peak put right."""
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
    """Measure two small steps on the model's device beside their predictions."""
    beyond: dict[int, int] = {}
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    for size in samples:
        # Copied: a view would bring all of the batch it is cut from.
        micro = map_tensors(resize_batch(batch, size, static=static), torch.clone)
        used = measure_step(model, loss, micro, precision=precision)
        predicted = predict_peak(model, loss, micro, precision=precision).peak - held
        # Of what is predicted only the libraries' workspaces may be missing.
        beyond[size] = max(used - predicted, -CUDA_WORKSPACES)
    (small, low), (large, high) = sorted(beyond.items())[0], sorted(beyond.items())[-1]
    slope = max(0.0, (high - low) / (large - small)) if large > small else 0.0
    # What grows faster than the micro-batch itself is a step, and no line.
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
    """`choose_micro_batch`, put right by what two smaller steps take on the model's device.

    The steps are a quarter and half of what was predicted to fit, so they do not run into the
    wall. On the CPU nothing is measured: there the prediction is exact.
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
    """The bytes that two micro-batches like this one really add to what is there already.

    No update is made; `then` is called where one would be, with the gradients there. On CUDA the
    allocator says it, elsewhere the meter; there more than `limit` bytes raise
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
            # cuBLAS keeps its workspaces once it has them; the prediction counts them as used.
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
