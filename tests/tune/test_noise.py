"""The noise scale of gradients whose noise is known; unbiased, and it changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import mode_of, traced
from tests.distributed.launch import torchrun
from tests.support import measured, mlp, samples
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.tune.noise_scale import Estimator, NoiseProbe, NoiseScale, Observation

pytestmark = pytest.mark.slow
PARAMETERS = 40


class Quadratic(nn.Module):
    """½ |w − x|² per sample: its gradient w − x is Gaussian where x is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(PARAMETERS // 2, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(PARAMETERS // 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (torch.cat([self.first, self.second]) - x).square().sum(-1)


def gaussian(number: int, *, gradient: float, spread: Tensor, seed: int) -> Tensor:
    """Samples whose gradients at w = 0 have this mean and these standard deviations."""
    place = torch.Generator().manual_seed(seed)
    noise = torch.randn(number, PARAMETERS, generator=place, dtype=torch.float64)
    return -gradient + noise * spread


SPREAD = torch.linspace(0.5, 1.5, PARAMETERS, dtype=torch.float64)
GRADIENT = 0.1
TRACE = float(SPREAD.square().sum())
SIGNAL = PARAMETERS * GRADIENT**2
CRITICAL = TRACE / SIGNAL  # 108 samples


def summed(model: nn.Module, x: Tensor) -> wb.Loss:
    losses = model(x)
    return wb.Loss(losses.sum(), len(x))


def still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)  # the gradient's mean stays where it is


def probe_of(train: wb.WholeBatch) -> NoiseProbe:
    [probe] = train.observers
    assert isinstance(probe, NoiseProbe)
    return probe


def long_memory(train: wb.WholeBatch) -> None:
    probe_of(train)._estimator = Estimator(most=10**6)


@pytest.mark.parametrize(
    ("batch", "micro_batch", "options"),
    [
        (128, 32, {"units": len}),  # counted before the first backward
        (61, 9, {"execute": "compile"}),  # the last micro-batch has 7
    ],
)
def test_known_noise_is_found_within_ten_percent(
    batch: int, micro_batch: int, options: dict[str, Any]
) -> None:
    model = Quadratic()
    make = traced if "execute" in options else measured
    train = make(model, still(model), loss=summed, micro_batch=micro_batch, noise=1, **options)
    for seed in range(300):
        train.step(gaussian(batch, gradient=GRADIENT, spread=SPREAD, seed=seed))
    noise = probe_of(train).estimate
    assert noise is not None
    assert mode_of(train) == ("operations" if "execute" in options else "eager")
    assert noise.samples == 256
    assert noise.spread == pytest.approx(TRACE, rel=0.03)
    assert noise.critical == pytest.approx(CRITICAL, rel=0.1)
    assert noise.low <= CRITICAL <= noise.high
    assert noise.high - noise.low < 0.5 * CRITICAL


def test_units_that_differ_from_sample_to_sample() -> None:
    """Tokens: a micro-batch of n of them has the noise of n, whatever the samples are."""
    model = Quadratic()

    def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        losses = model(micro["x"]) * micro["mask"]
        return wb.Loss(losses.sum(), micro["mask"].sum())

    train = measured(model, still(model), loss=loss, micro_batch=3, noise=1)
    place = torch.Generator().manual_seed(0)
    long_memory(train)
    for seed in range(500):
        x = gaussian(12 * 9, gradient=GRADIENT, spread=SPREAD, seed=seed).view(12, 9, PARAMETERS)
        lengths = torch.randint(0, 10, (12, 1), generator=place)
        lengths[:3] = 0 if seed % 5 == 0 else lengths[:3]  # a micro-batch without any
        mask = (torch.arange(9)[None] < lengths).double()
        train.step({"x": x, "mask": mask})
    noise = probe_of(train).estimate
    assert noise is not None
    assert noise.spread == pytest.approx(TRACE, rel=0.05)
    assert noise.critical == pytest.approx(CRITICAL, rel=0.1)


@pytest.mark.parametrize(
    ("sizes", "firsts"),
    [((5, 5, 5, 5), 1), ((1, 2, 3, 9), 1), ((9, 3, 2, 1), 2), ((7, 1), 1), ((4, 9, 2), 3)],
)
def test_both_estimates_are_without_bias(sizes: tuple[int, ...], firsts: int) -> None:
    """Their mean over 10,000 windows is the truth to four of its own standard errors.

    `firsts` ranks have begun with the first of these micro-batches.
    """
    place = torch.Generator().manual_seed(1)
    count, width = 10_000, 6
    spread = torch.linspace(0.5, 2.0, width, dtype=torch.float64)
    mean = torch.full((width,), 0.4, dtype=torch.float64)
    noise = torch.randn(count, len(sizes), width, generator=place, dtype=torch.float64)
    units = torch.tensor(sizes, dtype=torch.float64)[None, :, None]
    parts = units * mean + units.sqrt() * noise * spread
    whole = parts.sum(1).norm(dim=-1).tolist()
    moments = (parts.square().sum(-1) / units[..., 0])[:, :firsts].sum(1).tolist()
    seen = float(sum(sizes[:firsts]))
    found = [
        Observation.of((moment, seen, firsts), norm=norm, units=float(sum(sizes)), micro_batches=4)
        for moment, norm in zip(moments, whole, strict=True)
    ]
    for name, truth in (
        ("spread", float(spread.square().sum())),
        ("signal", float(mean.square().sum())),
    ):
        values = torch.tensor([getattr(one, name) for one in found], dtype=torch.float64)
        error = (values.mean() - truth).abs() / (values.std() / math.sqrt(count))
        assert error < 4.0, name


# ----------------------------------------------------------------- uncertainty


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    place = torch.Generator().manual_seed(3)
    inside = 0
    trials, windows = 400, 24
    for _ in range(trials):
        noise = torch.randn(windows, 2, generator=place, dtype=torch.float64)
        estimator = Estimator(most=10**6)
        for a, b in noise.tolist():
            estimator.windows.append(Observation(10.0 + 2.0 * a, 1.0 + 0.6 * b + 0.2 * a, 1.0, 4))
        found = estimator.estimate()
        assert found is not None
        inside += found.low <= 10.0 <= found.high
    assert 0.92 <= inside / trials <= 0.98


def test_gradients_that_shrink_do_not_hide_what_comes_after() -> None:
    """Averages of the raw numbers would be those of the first few windows, where |G|² was large."""
    estimator = Estimator(most=10**6)
    for window in range(40):
        size = 1000.0 * 0.7**window
        estimator.windows.append(
            Observation(80.0 * size, (1.0 if window >= 4 else 50.0) * size, 8.0, 4)
        )
    found = estimator.estimate()
    assert found is not None
    assert 20.0 < found.critical < 80.0  # as they are: 80 × 1000 / (50 × 1000) = 1.6


# ---------------------------------------------------------------------- advice


def scale_of(batch: float, low: float, high: float, **more: Any) -> NoiseScale:
    middle = high / 2 if math.isinf(low) else (low + min(high, 10 * low)) / 2
    values = {"spread": 1.0, "signal": 1.0, "samples": 50, "micro_batches": 8}
    return NoiseScale(middle, low, high, batch=batch, **{**values, **more})


@pytest.mark.parametrize(
    ("noise", "verdict", "words"),
    [
        (
            scale_of(100, 900, 1500),
            "enlarge",
            "enlarge the batch: 100 tokens an update are far below",
        ),
        (scale_of(1000, 900, 1500), "keep", "are near the critical 1,200 (900 to 1,500)"),
        (scale_of(1000, 20, 30000), "keep", "not known well yet"),
        (scale_of(8000, 900, 1500), "stop accumulating", "2 of the 8 micro-batches would do"),
    ],
)
def test_advice(noise: NoiseScale, verdict: str, words: str) -> None:
    assert noise.verdict == verdict
    assert words in noise.advice("tokens")


# --------------------------------------------------------------- in WholeBatch


@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"execute": "compile"}])
def test_measuring_changes_no_bit(options: dict[str, Any]) -> None:
    ends = []
    for noise in (None, 1):
        model = mlp(dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters())

        def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
            return wb.cross_entropy(model(micro["x"]), micro["y"])

        make = traced if "execute" in options else measured
        train = make(model, optimizer, loss=loss, micro_batch=4, noise=noise, **options)
        for number in range(9):
            train.step(samples(11 + number, dtype=torch.float32))
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
        assert noise is None or probe_of(train).estimate is not None
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_the_loss_scale_is_taken_out() -> None:
    found = []
    for scale in (1.0, 1024.0):
        model = Quadratic()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        train = measured(model, still(model), loss=summed, micro_batch=8, noise=1, scaler=scaler)
        for seed in range(9):
            train.step(gaussian(32, gradient=0.1, spread=SPREAD, seed=seed))
        assert probe_of(train).estimate is not None
        found.append(probe_of(train).estimate.critical)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_a_loss_of_several_terms_is_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    model = Quadratic()

    def loss(model: nn.Module, x: Tensor) -> Any:
        total = model(x).sum()
        return wb.Loss.terms({"a": (total, len(x)), "b": (total, 2 * len(x))})

    train = measured(
        model,
        still(model),
        loss=loss,
        units=lambda x: {"a": len(x), "b": 2 * len(x)},
        micro_batch=8,
        noise=1,
    )
    for seed in range(3):
        train.step(gaussian(16, gradient=0.1, spread=SPREAD, seed=seed))
    assert probe_of(train).estimate is None
    assert "several terms" in caplog.text


@pytest.mark.parametrize("noise", [0, True, "often"])
def test_a_wrong_option_is_refused(noise: Any) -> None:
    model = Quadratic()
    with pytest.raises(OptionError, match="must be a positive number of windows"):
        measured(model, still(model), loss=summed, noise=noise)


def test_what_cannot_be_measured_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"NoiseProbe: the samples of a batch depend"):
        measured(model, optimizer, loss=summed, noise=4)
    model = Quadratic()
    with pytest.raises(UnsupportedError, match=r"NoiseProbe: on_gradient= may change"):
        measured(model, still(model), loss=summed, on_gradient=lambda named: None)


@pytest.mark.distributed
def test_ranks_are_measured_before_their_gradients_are_reduced(tmp_path: Any) -> None:
    """DDP on two ranks, uneven shares, one rank without data in some windows.

    In the same launch: a rank that loads slowly is waited for, which is a part of its own.
    """
    torchrun(Path(__file__).with_name("noise_worker.py"), 2, str(tmp_path / "report.json"))
    for case in json.loads((tmp_path / "report.json").read_text()):
        assert case["spread"] == pytest.approx(TRACE, rel=0.05), case
        assert case["critical"] == pytest.approx(CRITICAL, rel=0.1), case
        assert case["same"], case
    found = json.loads((tmp_path / "straggler.json").read_text())
    assert found["name"] in ("input", "waiting")
    assert found["seconds"]["ranks wait"] > 0.1
    assert found["seconds"]["reduction"] < 0.05
    assert sum(found["seconds"].values()) == pytest.approx(found["took"], rel=0.1)
