"""The largest micro-batch that fits a budget, by prediction and not by running into the wall.

The peak over the micro-batch size is the largest of several straight lines (a small micro-batch
is bound by the optimizer's step, a larger one by activations), so it bends upwards only. Beyond
two points it lies above the line through them, between two it lies below: extrapolate to find a
size that does not fit, then close in between, where a line's answer is always safe.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from wholebatch.core.splitting import Tokens, batch_size_of, split
from wholebatch.core.splitting.micro_batches import lengths_of
from wholebatch.core.splitting.samples import Static, layout_of
from wholebatch.errors import OptionError
from wholebatch.memory.budget import bytes_said
from wholebatch.memory.predict import Prediction, Predictor
from wholebatch.memory.resized_batches import resize_batch

__all__ = ["Choice", "choose_micro_batch", "choose_tokens", "largest_fitting"]

CLOSE_ENOUGH = 0.04
"""A size is good enough when one larger by this share is known not to fit."""


@dataclass(frozen=True)
class Choice:
    """A micro-batch size, why it is that one, and what it was chosen among."""

    micro_batch: int
    """Samples; or tokens, where the budget was one of tokens."""
    prediction: Prediction
    budget: int
    is_whole_batch: bool
    tried: Mapping[int, int] = field(default_factory=dict)
    """What was needed for every size that was predicted on the way: the peak, and what must stay
    free beside it."""
    measured: int | None = None
    """What a trial step at this size took, with all that a run holds; None: there was none."""
    failed: tuple[int, ...] = ()
    """Sizes that a trial step ran out of memory with."""
    way: str = ""
    """How the micro-batches run, where that was chosen too."""

    @property
    def fits(self) -> bool:
        """False: not even the smallest micro-batch fits; this is that one."""
        if self.measured is not None or self.failed:
            return self.measured is not None
        return self.tried[self.micro_batch] <= self.budget

    def said(self) -> str:
        """What was chosen and why, in two lines."""
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
            else:  # a trial step has shown it
                beyond = f"; for {above} the memory is in too many pieces"
            why = f"the largest that fits{beyond}"
        shown = "" if self.measured is None else f" ({bytes_said(self.measured)} in a trial step)"
        way = f", {self.way}" if self.way else ""
        return (
            f"micro-batch {self.micro_batch}{way}: {why} (budget {bytes_said(self.budget)})\n"
            f"predicted peak {bytes_said(self.prediction.peak)}{shown}: {parts}"
        )


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
    gradients: str = "device",
    noise: bool = False,
) -> Choice:
    """The largest micro-batch whose predicted peak is within `budget` bytes.

    `batch` is a batch of the data with its largest samples; `most` is how many samples an update
    has (default: those of `batch`), which no micro-batch exceeds. `correct(samples, peak)` puts a
    predicted peak right by what was measured (`calibrate`). If not even one sample fits, the
    choice is 1 and `choice.fits` is False.
    """
    most = batch_size_of(batch, static=static) if most is None else most
    if most < 1:
        raise OptionError(f"most={most}: must be at least 1 sample")
    predictor = Predictor(model, loss, optimizer=optimizer, device=device)
    predictions: dict[int, Prediction] = {}

    def peak_of(samples: int) -> int:
        predicted = predictor.peak(
            resize_batch(batch, samples, static=static),
            precision=precision,
            micro_batches=1 if samples == most else 2,
            gradients=gradients,
            noise=noise,
        )
        predictions[samples] = corrected(predicted, samples, correct)
        return predictions[samples].peak + spare(predictions[samples], predictor.device)

    tried: dict[int, int] = {}
    size = largest_fitting(peak_of, budget=budget, most=most, tried=tried)
    return Choice(size, predictions[size], budget, size == most and tried[size] <= budget, tried)


def corrected(
    prediction: Prediction, samples: int, correct: Callable[[int, int], int] | None
) -> Prediction:
    """A prediction with what was measured beyond it counted as temporaries."""
    if correct is None:
        return prediction
    peak = correct(samples, prediction.peak)
    by_category = dict(prediction.by_category)
    by_category["temporaries"] = by_category.get("temporaries", 0) + peak - prediction.peak
    return replace(prediction, peak=peak, by_category=by_category)


def spare(prediction: Prediction, device: torch.device) -> int:
    """What must stay free beside the peak, because an allocator's free memory is in pieces.

    CUDA's caching allocator cannot move what is alive. Under a hard limit on an H200, GPTs run
    where one more of their largest piece would have room and mostly fail where it would not;
    models of small pieces (a ViT, a ResNet) lose up to 3%. Expandable segments can be mapped
    together, so there the size of a piece does not matter.
    """
    if device.type != "cuda":
        return 0
    options = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_CUDA_ALLOC_CONF", ""
    )
    if "expandable_segments:True" in options:
        return prediction.peak // 25
    return max(prediction.largest, prediction.peak // 25)


def largest_fitting(
    peak_of: Callable[[int], int],
    *,
    budget: int,
    most: int,
    tried: dict[int, int] | None = None,
    least: int = 1,
) -> int:
    """The largest size up to `most` with `peak_of(size) <= budget`, in few calls; else `least`.

    Good to `CLOSE_ENOUGH` (or one), for peaks that grow with the size and bend upwards only.

    >>> largest_fitting(lambda size: 100 + max(300, 40 * size), budget=1000, most=512)
    22
    """
    tried = {} if tried is None else tried

    def fits(size: int) -> bool:
        if size not in tried:
            tried[size] = peak_of(size)
        return tried[size] <= budget

    if not fits(least):
        return least
    good, bad = least, most + 1
    guess = min(most, max(4 * least, 4))
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
    if bad <= most:  # between: the peak lies below the line, so what it allows does fit
        slope = (tried[bad] - tried[good]) / (bad - good)
        guess = good + int((budget - tried[good]) / slope)
        # A line that allows nothing new has converged unless the peak bends: look in the middle.
        return guess if guess > good else (good + bad) // 2
    below = sorted(size for size in tried if size <= good)
    if len(below) < 2:
        return min(most, 4 * good)
    slope = (tried[good] - tried[below[-2]]) / (good - below[-2])
    if slope <= 0:  # still bound by the optimizer's step
        return min(most, 8 * good)
    # Not further than eightfold: the line may be the one before the bend.
    return min(most, 8 * good, good + max(1, int((budget - tried[good]) / slope)))


def choose_tokens(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    *,
    by: Tokens,
    budget: int,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    device: torch.device | str | None = None,
    static: Static = (),
    correct: Callable[[int, int], int] | None = None,
) -> Choice:
    """The largest budget of tokens for which the worst micro-batch of the data fits.

    `batches` are batches that show how long sequences get (all of the data, or a sample with its
    longest). Each candidate is split as it would be in training, and predicted at its extremes:
    the micro-batches with the longest sequences, the most samples, and the most tokens.
    """
    if not batches:
        raise OptionError("batches=[]: give at least one, to see how long its sequences are")
    longest, shortest = _extremes(batches, by, static)
    most_samples = max(batch_size_of(batch, static=static) for batch in batches)
    predictor = Predictor(model, loss, optimizer=optimizer, device=device)
    predictions: dict[int, Prediction] = {}
    known: dict[tuple[bool, int], Prediction] = {}

    def of(sample: _Sample, samples: int) -> Prediction:
        key = (sample is longest, samples)
        if key not in known:
            micro = resize_batch(sample.batch, samples, static=static)
            known[key] = corrected(predictor.peak(micro, precision=precision), samples, correct)
        return known[key]

    def peak_of(tokens: int) -> int:
        worst = [of(one, min(most_samples, tokens // one.length)) for one in (longest, shortest)]
        predictions[tokens] = max(worst, key=lambda predicted: predicted.peak)
        return predictions[tokens].peak + spare(predictions[tokens], predictor.device)

    tried: dict[int, int] = {}
    size = largest_fitting(
        peak_of,
        budget=budget,
        most=most_samples * longest.length,
        least=longest.length,
        tried=tried,
    )
    is_whole = size == most_samples * longest.length and tried[size] <= budget
    return Choice(size, predictions[size], budget, is_whole, tried)


@dataclass(frozen=True)
class _Sample:
    """A batch of one sample, trimmed to its length."""

    batch: Any
    length: int


def _extremes(batches: Sequence[Any], by: Tokens, static: Static) -> tuple[_Sample, _Sample]:
    """The longest and the shortest sample of the data.

    At one budget of tokens, what a layer keeps per token is the same for all lengths, what
    attention keeps grows with the length, and what is kept per sample with the number of samples.
    So the worst micro-batch is one of the longest samples or one of the shortest.
    """
    longest: _Sample | None = None
    shortest: _Sample | None = None
    for batch in batches:
        layout = layout_of(batch, static=static)
        lengths, width = lengths_of(layout, by)
        if lengths is None:
            lengths = [width or 1] * layout.size
        for row in (
            max(range(layout.size), key=lengths.__getitem__),
            min(range(layout.size), key=lengths.__getitem__),
        ):
            length = max(1, lengths[row])
            trimmed = split(
                layout.take([row]),
                replace(by, budget=max(length, width or 1)),
                batch_size=1,
                static=static,
            )
            sample = _Sample(trimmed[0], length)
            if longest is None or length > longest.length:
                longest = sample
            if shortest is None or length < shortest.length:
                shortest = sample
    assert longest is not None
    assert shortest is not None
    return longest, shortest
