"""The search on machines whose speeds are known: what it finds, and what it does not measure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from wholebatch.memory.predict import Prediction
from wholebatch.tune import setting_measurements as bench
from wholebatch.tune.setting_measurements import Limits, TooSlow
from wholebatch.tune.settings import RunMode, Setting, Trial, sizes_of
from wholebatch.tune.tuning import Search
from wholebatch.tune.window_timing import Turns, Workload, ratio_of, usual
from wholebatch.window.window import Step

FULL, BF16 = RunMode("full", False, "eager", "auto"), RunMode("bf16", False, "eager", "auto")
AGAIN = RunMode("full", True, "eager", "auto")
SAMPLES = 64
Speed = Callable[[Setting], float]


class Machine:
    """Stands for `Running`: a window takes what `speed` says, with noise that only takes longer."""

    speed: Speed
    noise = 0.0
    load: Callable[[], float] = staticmethod(lambda: 1.0)
    draw = random.Random(0)
    device = torch.device("cpu")
    limit = 10**9
    recoveries = 0

    def __init__(self, workload: Any, setting: Setting) -> None:
        self.setting = setting
        self.train = self  # which is asked for its recoveries
        if self.peak() > self.limit:
            raise torch.OutOfMemoryError("out of memory")

    def window(self) -> tuple[float, Step]:
        return self.window_of(None, 0.0)

    def window_of(self, batch: Any, fetched: float) -> tuple[float, Step]:
        seconds = SAMPLES / type(self).speed(self.setting)
        seconds *= (1 + type(self).noise * self.draw.expovariate(1)) * type(self).load()
        return seconds, Step(1, 1.0, float(SAMPLES), 1.0, 1, seconds)

    def warm_up(self, *, most: float, patience: float | None = None) -> None:
        if patience is not None and self.window()[0] > patience:
            raise TooSlow

    def peak(self) -> int:
        mode = self.setting.mode
        return self.setting.micro_batch * (1 if mode.checkpointing else 4) * 10

    def split(self) -> dict[str, float]:
        return {"forward": 1.0}

    def update_bytes(self) -> int:
        return 0

    def fell_back(self) -> str | None:
        return None

    def close(self) -> None:
        pass


@dataclass
class Known:
    """Stands for `Predicted`: what the machine will say, or nothing."""

    budget: int
    knows: bool = True
    device = torch.device("cpu")

    def of(self, setting: Setting) -> Prediction | None:
        factor = 1 if setting.mode.checkpointing else 4
        peak = setting.micro_batch * factor * 10
        return Prediction(peak, {}, 0.0) if self.knows else None

    def need(self, setting: Setting) -> int | None:
        found = self.of(setting)
        return None if found is None else found.peak

    def fits(self, setting: Setting) -> bool:
        need = self.need(setting)
        return need is None or need <= self.budget

    def let_go(self) -> None:
        pass


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Search]:
    def run(
        speed: Speed,
        *modes: RunMode,
        budget: int = 10**6,
        knows: bool = True,
        noise: float = 0.0,
        limit: int = 10**9,
        seed: int = 0,
        every: bool = False,
        load: Callable[[], float] = lambda: 1.0,
        **limits: float,
    ) -> Search:
        kind = type(
            "Made",
            (Machine,),
            {
                "speed": staticmethod(speed),
                "noise": noise,
                "load": staticmethod(load),
                "limit": limit,
                "draw": random.Random(seed),
            },
        )
        monkeypatch.setattr(bench, "Running", kind)
        workload = Workload(lambda: None, None, lambda: None)  # type: ignore[arg-type, return-value]
        made = Search(
            workload,
            SAMPLES,
            Known(budget, knows),  # type: ignore[arg-type]
            budget,
            Limits(**limits),  # type: ignore[arg-type]
            sizes=sizes_of(SAMPLES),
            modes=modes or (FULL,),
        )
        made.run_all() if every else made.run()
        return made

    return run


def saturating(per_step: float, per_sample: float = 1e-3) -> Speed:
    """The usual machine: a micro-step costs something whatever its size."""

    def speed(setting: Setting) -> float:
        steps = -(-SAMPLES // setting.micro_batch)
        factor = 0.5 if setting.mode.precision == "bf16" else 1.0
        factor *= 1.3 if setting.mode.checkpointing else 1.0
        return SAMPLES / (per_step * steps + factor * per_sample * SAMPLES)

    return speed


@pytest.mark.parametrize("per_step", [0.0, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("seed", range(5))
def test_the_recommendation_is_within_five_percent(
    searched: Callable[..., Search], per_step: float, seed: int
) -> None:
    speed = saturating(per_step)
    made = searched(speed, FULL, BF16, AGAIN, noise=0.1, seed=seed)
    found = made.recommended()
    assert found is not None
    best = max(speed(Setting(s, w)) for w in (FULL, BF16, AGAIN) for s in sizes_of(SAMPLES))
    assert speed(found.setting) >= 0.95 * best


def comes_and_goes(seed: int) -> Callable[[], float]:
    """Others on the machine: for some windows everything takes up to three times as long."""
    draw = random.Random(seed)
    left, factor = 0, 1.0

    def load() -> float:
        nonlocal left, factor
        if left == 0:
            left, factor = draw.randint(1, 25), draw.choice((1.0, 1.0, 1.5, 2.0, 3.0))
        left -= 1
        return factor

    return load


@pytest.mark.parametrize("per_step", [1e-4, 3e-3])
@pytest.mark.parametrize("seed", range(10))
def test_what_else_the_machine_does_decides_nothing(
    searched: Callable[..., Search], per_step: float, seed: int
) -> None:
    """Settings are compared within a round: what comes over all of them changes no ratio."""
    speed = saturating(per_step)
    made = searched(speed, FULL, BF16, noise=0.03, seed=seed, load=comes_and_goes(seed), seconds=0)
    found = made.recommended()
    assert found is not None
    best = max(speed(Setting(s, w)) for w in (FULL, BF16) for s in sizes_of(SAMPLES))
    assert speed(found.setting) >= 0.95 * best


def test_a_cache_that_overflows_is_found(searched: Callable[..., Search]) -> None:
    """The largest size is not always the fastest."""
    made = searched(lambda setting: {64: 60.0, 32: 80.0, 16: 100.0}.get(setting.micro_batch, 50.0))
    found = made.recommended()
    assert found is not None
    assert found.setting.micro_batch == 16


def test_what_does_not_fit_is_not_tried(searched: Callable[..., Search]) -> None:
    made = searched(saturating(1e-3), budget=16 * 40, limit=16 * 40)
    statuses = {s.micro_batch: t.status for s, t in made.trials.items()}
    assert statuses[64] == statuses[32] == "pruned"
    assert "predicted to need" in made.trials[Setting(64, FULL)].why
    found = made.recommended()
    assert found is not None
    assert found.setting.micro_batch == 16


def test_without_predictions_the_wall_is_met_and_survived(searched: Callable[..., Search]) -> None:
    made = searched(saturating(1e-3), knows=False, limit=16 * 40)
    assert made.trials[Setting(64, FULL)].why == "ran out of memory"
    found = made.recommended()
    assert found is not None
    assert found.setting.micro_batch == 16


def test_checkpointing_is_tried_only_where_it_makes_room(searched: Callable[..., Search]) -> None:
    roomy = searched(saturating(1e-2), FULL, AGAIN)
    assert all(t.status == "pruned" for s, t in roomy.trials.items() if s.mode.checkpointing)
    tight = searched(saturating(5e-2), FULL, AGAIN, budget=16 * 40)
    found = tight.recommended()
    assert found is not None
    assert found.setting == Setting(64, AGAIN)
    assert tight.trials[Setting(16, AGAIN)].why.startswith("fits without checkpointing")


def test_a_slow_way_is_left_after_one_size(searched: Callable[..., Search]) -> None:
    made = searched(lambda s: 1.0 if s.mode == BF16 else 100.0, FULL, BF16)
    tried = [t for s, t in made.trials.items() if s.mode == BF16 and t.windows]
    assert len(tried) == 1
    assert tried[0].why == "stopped in its first window: more than 3 times slower"


@pytest.mark.parametrize(("budget", "size"), [(10**6, 64), (64 * 40, 32)])
def test_of_equally_fast_settings(searched: Callable[..., Search], budget: int, size: int) -> None:
    """The undivided batch where it leaves memory free; else as few parts as do."""
    found = searched(lambda setting: 100.0, budget=budget).recommended()
    assert found is not None
    assert found.setting.micro_batch == size


def test_time_is_up(searched: Callable[..., Search]) -> None:
    made = searched(saturating(1e-4), total=0.0)
    measured = [trial for trial in made.trials.values() if trial.windows]
    assert len(measured) == 1
    assert "not reached in 0 s" in [t.why for t in made.trials.values()]


def test_all_are_measured_when_asked(searched: Callable[..., Search]) -> None:
    made = searched(saturating(1e-2), FULL, BF16, every=True)
    assert all(trial.windows for trial in made.trials.values())
    assert len(made.trials) == 2 * len(sizes_of(SAMPLES))


def test_close_ones_are_measured_again_in_turn(searched: Callable[..., Search]) -> None:
    made = searched(saturating(1e-5))
    again = [t for t in made.trials.values() if t.why.startswith("measured, and again")]
    assert 2 <= len(again) <= 3


def test_the_faster_half_says_what_a_setting_can_do() -> None:
    workload = Workload(lambda: None, lambda *_: None, lambda: None)  # type: ignore[arg-type,return-value]
    turns = Turns(workload, [], rounds=[[1.1], [9.0], [1.0], [5.0]], units=[10.0] * 4)
    assert turns.rates(0)[0] == 10.0
    assert usual(turns.rates(0)) == pytest.approx((10 + 10 / 1.1) / 2)


def test_a_trial_as_data() -> None:
    trial = Trial(Setting(8, BF16), 8, "measured", "why", seconds=1.0, units_per_second=64.0)
    data = replace(trial, recommended=True).to_dict()
    assert (data["micro_batch"], data["precision"], data["execute"]) == (8, "bf16", "eager")
    assert data["recommended"] is True
    assert "setting" not in data


def test_a_median_with_the_interval_of_its_order() -> None:
    few, more = ratio_of([1.1, 0.9, 1.0]), ratio_of([float(value) for value in range(12)])
    assert (few.median, few.low, few.high) == (1.0, 0.9, 1.1)
    assert (more.median, more.low, more.high) == (5.5, 2.0, 9.0)  # 96% of such samples


def test_a_tie_is_left_undivided_where_memory_is_the_same(searched: Callable[..., Search]) -> None:
    made = searched(lambda setting: 100.0)
    for setting, trial in list(made.trials.items()):
        made.trials[setting] = replace(trial, peak=1000, predicted=1000)
    found = made.recommended()
    assert found is not None
    assert found.steps == 1
