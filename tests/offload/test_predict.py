"""Predicted memory of every way to keep gradients, beside what a real window has alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.errors import OptionError
from wholebatch.memory.make_it_fit import ladder
from wholebatch.memory.meter import MemoryMeter
from wholebatch.memory.plan import make_plan
from wholebatch.memory.predict import predict_peak
from wholebatch.offload.parameter_buckets import BUCKET_BYTES
from wholebatch.offload.transfer_to_host import ring_bytes
from wholebatch.options import grouped

WIDTH = 256


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def batch(samples: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, WIDTH), "y": torch.zeros(samples, dtype=torch.long)}


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * WIDTH * WIDTH * 4
    for gradients in ("host", "swap", "release", "moments"):
        monkeypatch.setitem(BUCKET_BYTES, gradients, size)


@pytest.mark.parametrize("gradients", ["release", "moments"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_prediction_is_close_to_a_real_window(
    gradients: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_buckets(monkeypatch)
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    options: dict[str, Any] = {"nonfinite": "skip"} if gradients == "release" else {}
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss,
        units=lambda m: len(m["y"]),
        **grouped({"micro_batch": 4, "gradients": gradients, **options}),
    )
    whole = batch(4 * micro_batches)
    train.step(whole)
    with MemoryMeter(model=model, optimizer=optimizer) as meter:
        train.step(whole)
    predicted = predict_peak(
        model,
        loss,
        batch(4),
        optimizer=optimizer,
        micro_batches=micro_batches,
        gradients=gradients,
    )
    # What differs is which few gradients wait for each other at the peak; in moments none do, but
    # the prediction's step has a bucket of them.
    few = 3 * 2 * WIDTH * WIDTH * 4
    assert abs(predicted.peak - meter.peak) <= (few if gradients == "release" else few / 3)
    plain = predict_peak(model, loss, batch(4), optimizer=optimizer, micro_batches=micro_batches)
    if gradients == "moments" or micro_batches == 1:
        assert predicted.peak <= plain.peak - bytes_of(model) + few


def test_gradients_on_the_host_leave_a_gpu_and_not_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_buckets(monkeypatch)
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters())

    def peak(gradients: str, device: str) -> dict[str, int]:
        return predict_peak(
            model, loss, batch(4), optimizer=optimizer, gradients=gradients, device=device
        ).by_category

    plain, host = peak("device", "cuda"), peak("host", "cuda")
    assert plain["gradients"] >= bytes_of(model)
    assert host["gradients"] <= plain["gradients"] / 2
    saved = sum(plain.values()) - sum(host.values())
    assert saved >= 0.5 * bytes_of(model) - ring_bytes(bytes_of(model))
    swap = peak("swap", "cuda")
    assert sum(plain.values()) - sum(swap.values()) >= 0.5 * bytes_of(model)
    assert sum(swap.values()) < sum(host.values())  # no ring
    assert peak("host", "cpu") == peak("swap", "cpu") == peak("device", "cpu")
    with pytest.raises(OptionError, match="gradients='disk'"):
        peak("disk", "cpu")


def test_plan_knows_all_of_them() -> None:
    model = deep()
    made = make_plan(
        model,
        loss,
        batch(2),
        batch_size=8,
        budget=2**40,
        optimizer=torch.optim.AdamW(model.parameters()),
        device="cuda",
    )
    others = {v.gradients: v for v in made.variants if v.gradients != "device"}
    assert list(others) == ["host", "swap", "release", "moments"]
    assert all(v.about == 8 for v in others.values())
    sgd = torch.optim.SGD(model.parameters())
    made = make_plan(
        model, loss, batch(2), batch_size=8, budget=2**40, optimizer=sgd, device="cuda"
    )
    assert {v.gradients for v in made.variants} == {"device", "host", "release"}


def test_fit_takes_the_host_and_never_the_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    small_buckets(monkeypatch)
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters())
    as_is = ladder(
        model, loss, batch(1), budget=2**40, optimizer=optimizer, device="cuda", lowers=False
    )
    assert [rung.gradients for rung in as_is][-1] == "host"
    assert as_is[-1].peak < as_is[0].peak
    assert {rung.gradients for rung in as_is} <= {"device", "host"}
    on_cpu = ladder(model, loss, batch(1), budget=2**40, optimizer=optimizer, device="cpu")
    assert {rung.gradients for rung in on_cpu} == {"device"}
