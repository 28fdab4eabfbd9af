"""The largest micro-batch that fits a budget, found by predictions, not by running out of memory.

The peak over the micro-batch size is the largest of several straight lines (a small micro-batch is
bound by the optimizer's step, a larger one by activations), so it is convex. Beyond two points it
lies above the line through them, between two it lies below. So the search extrapolates to a size
that does not fit, and then closes in between, where a line's answer is always safe.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch import batch_size_of
from wholebatch.batch.samples import Static, layout_of, take
from wholebatch.errors import OptionError
from wholebatch.memory.predict import Prediction, Predictor
from wholebatch.readable_sizes import bytes_said

CLOSE_ENOUGH = 0.04
"""A size is good enough if one larger by this share is known not to fit."""


@dataclass(frozen=True)
class Choice:
    """A micro-batch size, the reason for it, and the sizes that were tried."""

    micro_batch: int
    """Samples; or tokens, if the budget was one of tokens."""
    prediction: Prediction
    budget: int
    is_whole_batch: bool
    tried: Mapping[int, int] = field(default_factory=dict)
    """The bytes that each predicted size needs: its peak, and what must stay free beside it."""
    measured: int | None = None
    """The bytes of a trial step at this size, with all that a run holds; None without one."""
    failed: tuple[int, ...] = ()
    """The sizes at which a trial step ran out of memory."""

    @property
    def fits(self) -> bool:
        """False if not even the smallest micro-batch fits; this is that one."""
        if self.measured is not None or self.failed:
            return self.measured is not None
        return self.tried[self.micro_batch] <= self.budget

    def summary(self) -> str:
        """Return what was chosen and why, in two lines."""
        by_size = sorted(self.prediction.by_category.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {bytes_said(size)}" for name, size in by_size[:3] if size)
        if self.is_whole_batch:
            why = "the whole batch fits"
        elif self.failed:
            why = f"the largest that a trial step fits with; {min(self.failed)} ran out of memory"
        else:
            above = min((size for size in self.tried if size > self.micro_batch), default=None)
            if above is None:
                beyond = ""
            elif self.tried[above] > self.budget:
                beyond = f"; {above} would need {bytes_said(self.tried[above])}"
            else:  # A trial step has shown it.
                beyond = f"; for {above} the memory is in too many pieces"
            why = f"the largest that fits{beyond}"
        shown = "" if self.measured is None else f" ({bytes_said(self.measured)} in a trial step)"
        return (
            f"micro-batch {self.micro_batch}: {why} (budget {bytes_said(self.budget)})\n"
            f"predicted peak {bytes_said(self.prediction.peak)}{shown}: {parts}"
        )


@dataclass
class PeaksBySize:
    """Predictions for one way of running by the size of a micro-batch, each made once."""

    predictor: Predictor
    batch: Any
    most: int
    """The samples of an update on one device."""
    static: Static = ()
    how: Mapping[str, Any] = field(default_factory=dict)
    """Options of `Predictor.peak`."""
    made: dict[int, Prediction] = field(default_factory=dict)

    def at(self, size: int) -> Prediction:
        if size not in self.made:
            micro, number = (
                resize_batch(self.batch, size, static=self.static),
                -(-self.most // size),
            )
            self.made[size] = self.predictor.peak(micro, micro_batches=number, **self.how)
        return self.made[size]

    def need(self, size: int) -> int:
        """Return the bytes that a device must have for this size."""
        return needed(self.at(size), self.predictor.device)


def choose_micro_batch(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    budget: int,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    most: int | None = None,
    device: torch.device | str | None = None,
    static: Static = (),
    correct: Callable[[int, int], int] | None = None,
    optimizer_state: str = "device",
) -> Choice:
    """Return the largest micro-batch whose predicted peak is within `budget` bytes.

    `batch` is a batch of the data with its largest samples; `most` is the number of samples of an
    update (default: those of `batch`), which no micro-batch exceeds. `correct(samples, peak)`
    corrects a predicted peak by a measurement (`calibrate`). If not even one sample fits, the
    choice is 1 and `choice.fits` is False.
    """
    most = batch_size_of(batch, static=static) if most is None else most
    if most < 1:
        raise OptionError(f"most={most}: must be at least 1 sample")
    predictor = Predictor(model, loss, optimizer=optimizer, device=device)
    how = {"precision": precision, "optimizer_state": optimizer_state}
    peaks = PeaksBySize(predictor, batch, most, static, how)
    tried: dict[int, int] = {}

    def need(samples: int) -> int:
        if correct is not None:  # the bytes measured beyond a prediction are temporaries
            predicted = peaks.at(samples)
            peak, by_category = correct(samples, predicted.peak), dict(predicted.by_category)
            by_category["temporaries"] += peak - predicted.peak
            peaks.made[samples] = replace(predicted, peak=peak, by_category=by_category)
        return peaks.need(samples)

    size = largest_fitting(need, budget=budget, most=most, tried=tried)
    return Choice(size, peaks.at(size), budget, size == most and tried[size] <= budget, tried)


def spare(prediction: Prediction, device: torch.device) -> int:
    """Return the bytes that must stay free beside the peak, because free memory is fragmented.

    CUDA's caching allocator cannot move live memory. Under a hard limit on an H200, GPTs run if
    there is room for one more of their largest allocation, and mostly fail if there is not; models
    of small allocations (a ViT, a ResNet) lose up to 3%. Expandable segments can be mapped
    together, so there the size of an allocation does not matter.
    """
    if device.type != "cuda":
        return 0
    options = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_CUDA_ALLOC_CONF", ""
    )
    if "expandable_segments:True" in options:
        return prediction.peak // 25
    return max(prediction.largest, prediction.peak // 25)


def needed(prediction: Prediction, device: torch.device) -> int:
    """Return the bytes that a device must have for a predicted step."""
    return prediction.peak + spare(prediction, device)


def largest_fitting(
    peak_of: Callable[[int], int], *, budget: int, most: int, tried: dict[int, int] | None = None
) -> int:
    """Return the largest size up to `most` with `peak_of(size) <= budget`, or else 1.

    It takes few calls, and is good to `CLOSE_ENOUGH` (or one) for peaks that grow with the size and
    are convex.

    >>> largest_fitting(lambda size: 100 + max(300, 40 * size), budget=1000, most=512)
    22
    """
    tried = {} if tried is None else tried

    def fits(size: int) -> bool:
        if size not in tried:
            tried[size] = peak_of(size)
        return tried[size] <= budget

    if not fits(1):
        return 1
    good, bad = 1, most + 1
    guess = min(most, 4)
    while bad - good > max(1, int(CLOSE_ENOUGH * good)):
        if not good < guess < bad:
            guess = good + 1 if bad <= most else (good + bad) // 2
        if fits(guess):
            good = guess
            if good == most:
                return most
        else:
            bad = guess
        guess = _next_guess(tried, good, bad, budget=budget, most=most)
    return good


def _next_guess(tried: Mapping[int, int], good: int, bad: int, *, budget: int, most: int) -> int:
    if bad <= most:  # Between them the peak lies below the line, so its answer fits.
        slope = (tried[bad] - tried[good]) / (bad - good)
        guess = good + int((budget - tried[good]) / slope)
        # A line without a new answer has converged, unless the peak bends: try the middle.
        return guess if guess > good else (good + bad) // 2
    below = sorted(size for size in tried if size <= good)
    if len(below) < 2:
        return min(most, 4 * good)
    slope = (tried[good] - tried[below[-2]]) / (good - below[-2])
    if slope <= 0:  # It is still bound by the optimizer's step.
        return min(most, 8 * good)
    # Go up to eightfold at most: this may be the line before the bend.
    return min(most, 8 * good, good + max(1, int((budget - tried[good]) / slope)))


def resize_batch(batch: Any, samples: int, *, static: Static = ()) -> Any:
    """Return a batch of `samples` samples: the first of `batch`, repeated as often as needed.

    It works on real, fake and meta tensors. Leaves without samples are passed on unchanged.

    >>> resize_batch({"x": torch.tensor([1, 2, 3]), "name": "a"}, 5)
    {'x': tensor([1, 2, 3, 1, 2]), 'name': 'a'}
    """
    if samples < 1:
        raise OptionError(f"samples={samples}: must be at least 1")
    layout = layout_of(batch, static=static)
    if samples == layout.size:
        return batch

    def resized(value: Any) -> Any:
        if samples < layout.size:
            return take(value, slice(0, samples))
        times, rest = divmod(samples, layout.size)
        parts = [value] * times + ([take(value, slice(0, rest))] if rest else [])
        if isinstance(value, Tensor):
            return torch.cat(parts)  # Unlike indexing, this keeps the memory format.
        if isinstance(value, (list, tuple)):
            return type(value)(one for part in parts for one in part)
        return take(value, [row % layout.size for row in range(samples)])

    return layout.structure.build(
        [resized(leaf.value) if leaf.batched else leaf.value for leaf in layout.leaves]
    )
