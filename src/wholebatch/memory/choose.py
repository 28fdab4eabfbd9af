"""The largest micro-batch that fits a budget, by prediction and not by running into the wall.

The peak over the micro-batch size is the largest of several straight lines (a small micro-batch
is bound by the optimizer's step, a larger one by activations), so it bends upwards only. Beyond
two points it lies above the line through them, between two it lies below: extrapolate to find a
size that does not fit, then close in between, where a line's answer is always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wholebatch.errors import OptionError
from wholebatch.memory.batches import resize_batch
from wholebatch.memory.predict import Prediction, predict_peak
from wholebatch.splitting import Tokens, batch_size_of, split
from wholebatch.splitting.layout import Static
from wholebatch.splitting.structure import flatten

__all__ = ["Choice", "choose_micro_batch", "choose_tokens", "largest_fitting"]

Predict = Callable[[Any], Prediction]

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
    """The peak for every size that was predicted on the way."""

    @property
    def fits(self) -> bool:
        """False: not even the smallest micro-batch fits; this is that one."""
        return self.prediction.peak <= self.budget

    def said(self) -> str:
        """What was chosen and why, in two lines."""
        by_size = sorted(self.prediction.by_category.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {said_bytes(size)}" for name, size in by_size[:3] if size)
        if self.is_whole_batch:
            why = "the whole batch fits"
        else:
            above = min((size for size in self.tried if size > self.micro_batch), default=None)
            beyond = "" if above is None else f"; {above} would need {said_bytes(self.tried[above])}"
            why = f"the largest that fits{beyond}"
        return (
            f"micro-batch {self.micro_batch}: {why} (budget {said_bytes(self.budget)})\n"
            f"predicted peak {said_bytes(self.prediction.peak)}: {parts}"
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
    predictions: dict[int, Prediction] = {}

    def peak_of(samples: int) -> int:
        predicted = predict_peak(
            model,
            loss,
            resize_batch(batch, samples, static=static),
            optimizer=optimizer,
            precision=precision,
            micro_batches=1 if samples == most else 2,
            device=device,
        )
        predictions[samples] = corrected(predicted, samples, correct)
        return predictions[samples].peak

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
    return Prediction(peak, by_category, prediction.seconds)


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
    longest = min(_tokens_of(piece) for batch in batches for piece in split(batch, 1, static=static))
    most = max(_tokens_of(batch) for batch in batches)
    least = _least_budget(batches, by, static)
    predictions: dict[int, Prediction] = {}
    shapes: dict[tuple[tuple[int, ...], ...], Prediction] = {}

    def peak_of(tokens: int) -> int:
        worst: Prediction | None = None
        for micro in _extremes(batches, _with_budget(by, tokens), static):
            key = _shapes(micro)
            if key not in shapes:
                shapes[key] = predict_peak(
                    model, loss, micro, optimizer=optimizer, precision=precision, device=device
                )
            found = corrected(shapes[key], batch_size_of(micro, static=static), correct)
            if worst is None or found.peak > worst.peak:
                worst = found
        assert worst is not None
        predictions[tokens] = worst
        return worst.peak

    del longest
    tried: dict[int, int] = {}
    size = largest_fitting(peak_of, budget=budget, most=most, least=least, tried=tried)
    return Choice(size, predictions[size], budget, size == most and tried[size] <= budget, tried)
