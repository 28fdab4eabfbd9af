"""Layers that couple samples are found by type and by changing one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.audit.finding import AuditFinding
from wholebatch.audit.layers import layers_by_type
from wholebatch.batch.samples import readable_layout
from wholebatch.coupled.normalisation_layers import batchnorms
from wholebatch.verification.coupled_layers import layers_that_couple


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Centred(nn.Module):
    """Couples the samples, and no type says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def findings(model: nn.Module, batch: Any, run: Any = None) -> list[AuditFinding]:
    by_type, layout = layers_by_type(model), readable_layout(batch, None, ())
    if layout is None:
        return by_type
    known = {one.name for one in by_type if one.kind != "running"}
    changed = layers_that_couple(model, run or model, layout)
    return by_type + [one for one in changed if one.name not in known]


def found(model: nn.Module, batch: Any = None) -> dict[str, str]:
    made = layers_by_type(model) if batch is None else findings(model, batch)
    return {f.name: f.kind for f in made}


def test_by_type() -> None:
    model = nn.ModuleDict(
        {
            "plain": nn.BatchNorm2d(3),
            "lazy": nn.LazyBatchNorm2d(),
            "sync": nn.SyncBatchNorm(3),
            "own": Own(3),
            "frozen": nn.BatchNorm2d(3).eval(),
            "bare": nn.BatchNorm2d(3, track_running_stats=False).eval(),
            "instance": nn.InstanceNorm2d(3),
            "tracked": nn.InstanceNorm2d(3, track_running_stats=True),
            "layer": nn.LayerNorm(3),
        }
    )
    assert found(model) == {
        "plain": "batchnorm",
        "lazy": "batchnorm",
        "sync": "sync",
        "own": "custom",
        "bare": "batchnorm",
        "tracked": "running",
    }
    assert [name for name, _ in batchnorms(model)] == [
        "plain",
        "lazy",
        "sync",
        "own",
        "frozen",
        "bare",
    ]


def test_probe_names_the_origin_only() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Centred()), nn.Linear(4, 4), nn.Dropout(0.5)
    )
    assert found(model) == {}
    assert found(model, torch.randn(16, 4)) == {"1.1": "probe"}


def test_probe_agrees_with_the_types_and_leaves_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    assert found(model, batch) == {"1": "batchnorm"}
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_probe_sees_behind_batchnorms() -> None:
    """Behind one every sample moves with every other: it is kept from that for the probe."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), Own(4), nn.BatchNorm1d(4), nn.ReLU())
            self.centre = Centred()

        def forward(self, x: Tensor) -> Tensor:
            z = self.net(x)
            return self.centre(z) if self.centre.training else z - 2 * z.mean(0)

    torch.manual_seed(0)
    model = Behind()
    assert found(model, torch.randn(6, 4)) == {
        "net.1": "custom",
        "net.2": "batchnorm",
        "centre": "probe",
    }
    model.centre.eval()
    assert found(model, torch.randn(6, 4))[""] == "probe"


def test_probe_of_the_whole_model() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            z = self.net(x)
            return z @ z.T

    (finding,) = findings(Contrast(), torch.randn(5, 4))
    assert "the model itself (Contrast): its output for one sample changed" in str(finding)


@pytest.mark.parametrize("size", [0, 1])
def test_probe_of_a_single_sample_says_nothing(size: int) -> None:
    assert found(Centred(), torch.randn(size, 3)) == {}
