"""Where the time of a window goes: the part that was made slow is named."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from wholebatch.tune import Task
from wholebatch.tune.bottleneck import Bottleneck, find_bottleneck


class SlowStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.2)
        return super().step(closure)


@pytest.mark.parametrize("slow", ["input", "compute", "optimizer"])
def test_the_slow_part_is_named(slow: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(8, 2)
        kind = SlowStep if slow == "optimizer" else torch.optim.SGD
        return model, kind(model.parameters(), lr=0.1)

    def loss(model: Any, micro: Any) -> wb.Loss:
        time.sleep(0.1 if slow == "compute" else 0)
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    def batches() -> Any:
        time.sleep(0.2 if slow == "input" else 0)
        return {"x": torch.randn(6, 8), "y": torch.randint(0, 2, (6,))}

    found = find_bottleneck(Task(build, loss, batches), micro_batch=4, precision="full")
    assert found.name == slow
    assert found.steps == 2
    assert f"bottleneck: {slow}" in found.lines[-1]
    # Forward and the gradient of the weight: 2 × 8 × 2 operations each for 6 samples.
    assert found.operations == 2 * (2 * 6 * 8 * 2)


PARTS = {"loading": 0.0, "forward": 0.2, "backward": 0.3, "ranks wait": 0.0}
WINDOW: dict[str, Any] = {"took": 1.0, "windows": 5, "steps": 4, "reduced": 10**9}


def bottleneck(device: str = "cpu", operations: int = 10**14, **seconds: float) -> Bottleneck:
    parts = {**PARTS, "reduction": 0.0, "optimizer": 0.0, **seconds}
    return Bottleneck(parts, operations=operations, device=device, **WINDOW)


def test_more_steps_divide_the_share_of_the_network() -> None:
    found = bottleneck(reduction=0.5)
    assert found.name == "network"
    assert "2 GB/s, once all were there; 2, 4, 8 times the steps" in found.lines[1]
    assert found.lines[1].endswith("its share 33%, 20%, 11%")


def test_a_rank_that_is_waited_for_is_not_the_network() -> None:
    found = bottleneck(reduction=0.1, **{"ranks wait": 0.6})
    assert found.name == "waiting"
    assert "ranks wait 60%, reduction 10%" in found.lines[0]
    assert "they wait for the slowest" in found.lines[-1]


@pytest.mark.parametrize(
    ("name", "sixteen_bit", "peak"),
    [
        ("NVIDIA H200", True, 989e12),
        ("NVIDIA H200", False, 67e12),
        ("NVIDIA A100-SXM4-80GB", True, 312e12),
        ("NVIDIA GeForce RTX 5090", True, 210e12),
    ],
)
def test_the_peak_is_that_of_the_gpu_and_of_the_precision(
    name: str, sixteen_bit: bool, peak: float
) -> None:
    found = replace(bottleneck(name, operations=10**13), sixteen_bit=sixteen_bit)
    assert found.share_of_peak == pytest.approx(10**13 / 0.5 / peak)
    assert f"{'16-bit' if sixteen_bit else 'fp32'} peak" in "\n".join(found.lines)
