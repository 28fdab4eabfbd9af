"""Where the time of a window goes: the part that was made slow is named."""

from __future__ import annotations

import time
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


def test_more_steps_divide_the_share_of_the_network() -> None:
    seconds = {"loading": 0.0, "forward": 0.2, "backward": 0.3, "reduction": 0.5, "optimizer": 0.0}
    found = Bottleneck(seconds, steps=4, reduced=10**9, operations=10**9, device="cpu")
    assert found.name == "network"
    assert "2 GB/s; 2, 4, 8 times the steps" in found.lines[1]
    assert found.lines[1].endswith("its share 33%, 20%, 11%")
    gpu = Bottleneck(seconds, steps=4, reduced=1, operations=10**14, device="NVIDIA H200")
    assert gpu.share_of_peak == pytest.approx(10**14 / 0.5 / 989e12)
