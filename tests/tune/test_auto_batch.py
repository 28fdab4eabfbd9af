"""A batch that doubles where the schedule halves the rate."""

from __future__ import annotations

import math

import pytest
import torch

from wholebatch.noise_scale import NoiseScale
from wholebatch.tune.batch_scaling import AutoBatch, Follow

FIRST, DATA = 64, 4000  # Samples of the first batch, and the data in such batches.


def noise_of(critical: float) -> NoiseScale:
    """A critical batch that is known well, and from the start."""
    return NoiseScale(
        critical, critical, math.inf, spread=1.0, signal=1.0, samples=40, batch=1.0, micro_batches=2
    )


def decay(done: int) -> float:
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done / DATA))


def distance(critical: float, *, largest: int) -> tuple[int, float, dict[int, float]]:
    """Return the updates, how far Adam moves, and the schedule's rate where the batch doubled.

    A gradient of B samples has the norm √(1 + critical / B), and Adam divides by it.
    """
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    follow = Follow(optimizer, base_batch=FIRST, rule="sqrt")
    auto = AutoBatch(FIRST, largest)
    updates, moved, doubled, before = 0, 0.0, {}, FIRST
    while auto.done < DATA:
        optimizer.param_groups[0]["lr"] = decay(auto.done)
        follow.set(auto.batch, gain=auto.gain)
        assert follow.rates()[0] <= 1.0 + 1e-9  # Never above the peak of the schedule.
        moved += follow.rates()[0] / math.sqrt(1 + critical / auto.batch)
        updates += 1
        done = auto.done + auto.batch // FIRST
        if auto.after(float(auto.batch), noise_of(critical), decay(done)) > before:
            doubled[auto.batch], before = decay(done), auto.batch
    return updates, moved, doubled


@pytest.mark.parametrize("critical", [1e-9, 40.0, 100.0])
def test_it_moves_as_far_as_the_decayed_rate_in_fewer_updates(critical: float) -> None:
    plain, far, _ = distance(critical, largest=FIRST)
    updates, moved, doubled = distance(critical, largest=8 * FIRST)
    assert plain == DATA
    assert updates == pytest.approx(0.687 * DATA, rel=0.01)
    assert moved == pytest.approx(far, rel=1e-3)
    halves = {128: 0.5, 256: 0.25, 512: 0.125}
    assert doubled == pytest.approx(halves, rel=0.01)
    assert all(doubled[size] <= rate for size, rate in halves.items())


def test_without_signal_it_is_seesaw_and_far_above_the_noise_it_stays() -> None:
    auto = AutoBatch(FIRST)
    auto.after(float(FIRST), noise_of(math.inf), 1.0)
    assert auto.after(float(FIRST), noise_of(math.inf), 0.5) == 2 * FIRST
    assert auto.gain == 1.0
    far_above = NoiseScale(
        1.0, 0.5, 31.0, spread=1.0, signal=1.0, samples=40, batch=64.0, micro_batches=2
    )
    auto = AutoBatch(FIRST)
    assert {auto.after(float(FIRST), far_above, rate) for rate in (1.0, 0.5, 0.1)} == {FIRST}


def test_the_gain_is_for_rates_that_follow_by_the_square_root() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    follow = Follow(optimizer, base_batch=8, rule="linear")
    follow.set(16, gain=1.2)
    assert follow.rates() == [0.2]
