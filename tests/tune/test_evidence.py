"""Where the time goes, what holds it back, and the model of more ranks: arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wholebatch.errors import OptionError
from wholebatch.readable_sizes import PARTS
from wholebatch.tune.bottleneck import Fixed, accumulation, fixed_cost, name_bottleneck
from wholebatch.tune.machine_speed import RanksModel, parse_bandwidth
from wholebatch.tune.settings import RunMode, Setting, Trial
from wholebatch.tune.tuning import climb
from wholebatch.tune.window_timing import Busy, Clock, Stamps, _covered, additions, split_of

WAY = RunMode("full", False, "eager", "auto")


class Told(Clock):
    """A clock that is told the time."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.time = 0.0

    def now(self) -> float:
        return self.time


def stamped(*marks: tuple[str, float], tells_apart: bool = True) -> Stamps:
    stamps = Stamps(clock := Told(), tells_apart=tells_apart)
    for what, at in marks:
        clock.time = at
        stamps.mark(what)
    return stamps


WINDOW = (
    ("data", 0.0),
    ("start", 1.0),
    ("forward", 1.5),
    ("backward", 3.5),
    ("done", 6.5),
    ("forward", 6.75),
    ("backward", 8.75),
    ("done", 13.75),
    ("end", 14.75),
)


def test_split_of_a_window() -> None:
    split = split_of(stamped(*WINDOW))
    expected = {"data": 1.5, "forward": 4.0, "backward": 8.0, "idle": 0.25, "optimizer": 1.0}
    assert split == {**dict.fromkeys(PARTS, 0.0), **expected}
    assert sum(split.values()) == 14.75


def test_what_the_last_backward_takes_beyond_the_others_is_communication() -> None:
    split = split_of(stamped(*WINDOW), ranks=2)
    assert split["communication"] == 2.0
    assert split["backward"] == 6.0
    assert sum(split.values()) == 14.75


def test_the_reduction_of_a_single_micro_batch_is_told_from_its_backward() -> None:
    """The link is the bottleneck then, not launches; the remedy is named."""
    marks = [("data", 0.0), ("start", 0.0), ("forward", 0.0), ("backward", 20.0), ("done", 50.0)]
    split = split_of(stamped(*marks, ("end", 52.0)), ranks=2, alone=8.0)
    assert (split["backward"], split["communication"]) == (8.0, 22.0)
    trial = Trial(Setting(8, WAY), 1, "measured", "", seconds=52.0, split=split)
    named = name_bottleneck(trial, fixed=Fixed(25.0, 27.0, 2), used=0.1)
    assert named.kind == "network"
    assert "more micro-batches per update" in named.remedy
    assert named.utilisation == pytest.approx(0.1 * 28 / 52)


def test_the_ladder_measures_each_step_alone_and_on_top_of_the_others() -> None:
    seen: list[str] = []

    def measure(setting: Setting) -> Trial:
        seen.append(setting.said())
        slow = setting.mode.precision == "bf16"
        return Trial(setting, 1, "stopped" if slow else "measured", "", split={"forward": 1.0})

    rungs = climb(
        8,
        2,
        base=WAY,
        precision="bf16",
        can_checkpoint=True,
        can_offload=True,
        measure=measure,
        bound=lambda trial: name_bottleneck(trial, fixed=None, used=0.5),
    )
    assert [rung.what for rung in rungs] == [
        "as it is",
        "bf16 precision",
        "gradient checkpointing",
        "accumulation, 2 × 4",
        "optimizer state on the host",
    ]
    assert [rung.together.setting.said() for rung in rungs[2:]] == [
        "micro-batch 8, full, checkpointed, eager",  # bf16 was far too slow, and is left out
        "micro-batch 2, full, checkpointed, eager",
        "micro-batch 2, full, checkpointed, eager, optimizer state on the host",
    ]
    assert rungs[4].alone is not None
    assert (
        rungs[4].alone.setting.said() == "micro-batch 8, full, eager, optimizer state on the host"
    )
    assert rungs[0].to_dict()["remedy"] == "a lower precision, fewer operations, or more devices"


def test_a_graph_is_one_part() -> None:
    marks = [mark for mark in WINDOW if mark[0] not in ("forward", "backward")]
    split = split_of(stamped(*marks, tells_apart=False))
    assert split["micro-step"] == 12.75
    assert (split["data"], split["optimizer"]) == (1.0, 1.0)


def test_additions_are_taken_out_of_the_backward() -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters())
    split = {**dict.fromkeys(PARTS, 0.0), "backward": 5.0}
    clock = Clock(torch.device("cpu"))
    made = additions(split, optimizer, clock, times=3)
    assert 0 < made["addition"] <= 2.5
    assert made["addition"] + made["backward"] == pytest.approx(5.0)
    assert additions(split, optimizer, clock, times=0) == split


def test_idle_time_of_a_device_is_taken_from_all_parts() -> None:
    busy = Busy()
    split = {"forward": 3.0, "backward": 1.0, "idle": 0.0}
    assert busy.taken_out(split) == split
    busy.share = 0.75
    assert busy.taken_out(split) == {"forward": 2.25, "backward": 0.75, "idle": 1.0}
    assert _covered([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4


def trial(steps: int = 4, **split: float) -> Trial:
    full = {**dict.fromkeys(PARTS, 0.0), **split}
    seconds = sum(full.values())
    return Trial(Setting(16, WAY), steps, "measured", "", seconds=seconds, split=full, peak=1000)


@pytest.mark.parametrize(
    ("kind", "parts", "per_step", "used"),
    [
        ("compute", {"forward": 3.0, "backward": 6.0, "optimizer": 1.0}, 0.01, 0.6),
        ("memory", {"forward": 3.0, "backward": 6.0, "optimizer": 1.0}, 0.01, 0.1),
        ("launch", {"forward": 3.0, "backward": 6.0, "optimizer": 1.0}, 1.0, 0.1),
        ("launch", {"forward": 2.0, "backward": 3.0, "idle": 5.0}, 0.0, 0.1),
        ("data", {"data": 4.0, "forward": 3.0, "backward": 3.0}, 0.0, 0.5),
        ("network", {"forward": 3.0, "backward": 3.0, "communication": 4.0}, 0.0, 0.5),
    ],
)
def test_the_bottleneck_is_named_with_evidence(
    kind: str, parts: dict[str, float], per_step: float, used: float
) -> None:
    found = name_bottleneck(trial(**parts), fixed=Fixed(per_step, 1.0, 3), used=used)
    assert found.kind == kind
    assert found.evidence[0].startswith("of a window, ")
    assert any("of the speed of a large matrix product" in line for line in found.evidence)


def test_a_slow_close_is_the_bytes_it_moves_or_its_many_operations() -> None:
    """58% of the window is the optimizer: of large parameters, then of small ones."""
    slow = {"forward": 2.0, "backward": 2.0, "optimizer": 6.0}
    for moved, kind in ((2 * 10**9, "memory"), (10**6, "launch")):
        one = replace(trial(1, **slow), update_bytes=moved)
        found = name_bottleneck(one, fixed=None, used=0.6, bandwidth=1e9)
        assert found.kind == kind
        assert any(line.startswith("an update reads and writes") for line in found.evidence)


def test_reading_the_parameters_is_not_launching() -> None:
    """What a micro-step costs whatever its size may be its parameters' bytes."""
    one = trial(4, forward=3.0, backward=6.0, optimizer=1.0)
    for moving, kind in ((0.0, "launch"), (0.9, "memory")):
        found = name_bottleneck(one, fixed=Fixed(1.0, 6.0, 3, moving), used=0.1)
        assert found.kind == kind


def test_arithmetic_that_takes_more_than_launches_is_compute() -> None:
    one = trial(1, forward=3.0, backward=6.0, optimizer=1.0)
    assert name_bottleneck(one, fixed=Fixed(3.0, 7.0, 3), used=0.7).kind == "compute"
    assert name_bottleneck(one, fixed=Fixed(3.0, 7.0, 3), used=0.2).kind == "launch"


def test_the_cost_of_a_micro_step_needs_two_sizes() -> None:
    assert fixed_cost([trial(forward=1.0)]) is None
    falling = [trial(steps, forward=1.0 - 0.01 * steps) for steps in (1, 2, 4)]
    found = fixed_cost(falling)
    assert found is not None
    assert found.per_step == 0.0  # a window is not made faster by dividing it


def test_what_more_accumulation_changes() -> None:
    smaller = replace(trial(8, forward=1.2), peak=600)
    said = accumulation(trial(forward=8.0, optimizer=2.0), fixed=Fixed(0.5, 8, 3), smaller=smaller)
    assert "about 20% more time, and 600 bytes instead of 1000 bytes" in said[0]
    assert "at most 20% less time per unit" in said[1]


def test_a_measured_peak_is_not_compared_with_a_predicted_one() -> None:
    whole = replace(trial(forward=8.0), peak=1000, predicted=90)
    smaller = replace(trial(8, forward=1.2), peak=None, predicted=50)
    said = accumulation(whole, fixed=Fixed(0.5, 8, 3), smaller=smaller)
    assert "50 bytes instead of 90 bytes" in said[0]


def test_without_a_split_there_is_less_to_say() -> None:
    bare = replace(trial(forward=1.0), split={})
    found = name_bottleneck(bare, fixed=Fixed(0.2, 0.2, 2), used=None)
    assert found.kind == "launch"
    assert len(found.evidence) == 1
    assert len(accumulation(bare, fixed=Fixed(0.2, 0.2, 2), smaller=None)) == 1


def test_a_ring_over_ranks() -> None:
    model = RanksModel(1.0, 0.25, 100.0, 8 * 10**8, 1e9, measured=False, latency=0.0)
    assert model.reduction(1) == 0.0
    assert model.reduction(2) == pytest.approx(0.8)
    assert model.reduction(8) == pytest.approx(1.4)
    point = model.point(8)
    assert point["seconds"] == pytest.approx(2.4)
    assert point["seconds_overlapped"] == pytest.approx(2.15)
    assert point["units_per_second"] == pytest.approx(8 * 100 / 2.4)
    data = model.to_dict([4, 2])
    assert data["is_model"] is True
    assert data["said"].startswith("A model: ")
    assert [point["ranks"] for point in data["points"]] == [1, 2, 4]


def test_bandwidths() -> None:
    assert parse_bandwidth("1.5 GB/s") == 1.5e9
    assert parse_bandwidth("400Gbit/s") == 5e10
    for wrong in ("fast", "0GB/s", "10", "-1GB/s"):
        with pytest.raises(OptionError, match="must be a rate of one rank's link"):
            parse_bandwidth(wrong)
