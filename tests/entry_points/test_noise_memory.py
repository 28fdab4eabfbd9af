"""How long the noise scale is averaged: what stays is known better, what changes is followed."""

from __future__ import annotations

import math

import pytest
import torch

from wholebatch.noise_scale import Estimator, NoiseScale, Observation


def observed(scales: list[float], *, seed: int) -> NoiseScale:
    """What an estimator says of windows of 4 × 8 units in ten dimensions, of these scales."""
    place = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(scales), 4, 10, generator=place, dtype=torch.float64)
    means = torch.tensor(scales, dtype=torch.float64).rsqrt()
    parts = 8 * means[:, None, None] + math.sqrt(8) * noise
    own, whole = parts.square().sum((1, 2)).tolist(), parts.sum(1).norm(dim=1).tolist()
    estimator = Estimator()
    for squares, norm in zip(own, whole, strict=True):  # four ranks of one micro-batch
        seen = Observation.of((squares / 8, 32.0, 4), norm=norm, units=32.0, micro_batches=4)
        assert seen is not None
        estimator.add(seen)
    found = estimator.estimate()
    assert found is not None
    return found


def off_by() -> float:
    """The root of the mean square, over windows of one scale."""
    found = [observed([32.0] * 600, seed=seed).critical / 32 - 1 for seed in range(40)]
    return math.sqrt(sum(value**2 for value in found) / len(found))


def test_what_stays_is_known_the_better(monkeypatch: pytest.MonkeyPatch) -> None:
    known = off_by()
    monkeypatch.setattr("wholebatch.noise_scale._half_life", lambda *given: given[-1])
    assert known < 0.06
    assert known < off_by() / 1.5  # the same windows with the shortest memory alone


def test_what_changes_is_followed() -> None:
    found = observed([32.0] * 220 + [128.0] * 80, seed=1)
    assert found.critical > 64.0  # nearer to the new one
    assert found.low <= found.critical <= found.high


@pytest.mark.parametrize("growth", [1.0, 2 ** (1 / 400)])
def test_the_interval_is_that_of_the_newest_windows(growth: float) -> None:
    """Whatever the estimate rests on: it holds the truth of now, while the scale grows too."""
    scales = [32.0 * growth**window for window in range(300)]
    inside = 0
    for seed in range(100):
        found = observed(scales, seed=seed)
        inside += found.low <= scales[-1] <= found.high
        assert found.low <= found.critical <= found.high
    assert inside >= (88 if growth == 1.0 else 75)


def test_it_is_told_by_the_number_of_windows_alone() -> None:
    """One that goes on from a saved state says what the other says, at every window."""
    first, found = Estimator(most=200), []
    for window in range(450):
        first.add(Observation(10.0 + window % 7, 1.0 + window % 3, 32.0, 4))
        second = Estimator(most=200)
        second.seen = list(first.seen)
        found.append(first.estimate())
        assert found[-1] == second.estimate()
    assert len({id(one) for one in found[150:]}) < 200  # not anew every time
    assert found[-1] is not None
    assert 140 < found[-1].samples <= 200
