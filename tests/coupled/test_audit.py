"""The audit finds what couples samples, by type and by changing one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.coupled.audit import audit
from wholebatch.coupled.normalisation_layers import batchnorms


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Centred(nn.Module):
    """Couples the samples, and no type says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def found(model: nn.Module, batch: Any = None, **options: Any) -> dict[str, str]:
    return {f.name: f.kind for f in audit(model, batch, **options).findings}


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


def test_report_names_layers_and_says_what_to_do() -> None:
    report = audit(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    assert report
    assert str(report).startswith("1 layer couples the samples of a batch (by type):\n  1 (Batch")
    assert 'WholeBatch(batchnorm="exact")' in str(report)
    assert not audit(nn.Linear(2, 3))


def test_probe_names_the_origin_only() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Centred()), nn.Linear(4, 4), nn.Dropout(0.5)
    )
    assert found(model) == {}
    report = audit(model, torch.randn(16, 4))
    assert [f.name for f in report.findings] == ["1.1"]


def test_probe_agrees_with_the_types_and_leaves_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    report = audit(model, torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    assert [(f.name, f.kind) for f in report.findings] == [("1", "batchnorm")]
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


def test_layers_that_split_their_batch_are_named_by_type() -> None:
    class GBN(nn.Module):
        """As TabNet's."""

        def __init__(self) -> None:
            super().__init__()
            self.bn, self.virtual_batch_size = nn.BatchNorm1d(4), 128

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.bn(part) for part in x.split(self.virtual_batch_size)])

    report = audit(nn.Sequential(GBN(), nn.Linear(4, 2)))
    assert ("0", "ghost") in [(f.name, f.kind) for f in report.findings]


def test_probe_of_the_whole_model() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            z = self.net(x)
            return z @ z.T

    report = audit(Contrast(), torch.randn(5, 4))
    assert [f.name for f in report.findings] == [""]
    assert "(the model itself) (Contrast): output for one sample moved" in str(report)


def test_probe_takes_tokens_keywords_and_a_forward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.couple = Centred()

        def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
            return self.couple(self.embed(ids)) * scale

    ids = torch.arange(12).view(4, 3) % 11
    assert found(Net(), {"ids": ids}) == {"couple": "probe"}
    assert found(Net(), (ids, 2.0)) == {"couple": "probe"}
    assert found(Net(), {"x": [ids]}, forward=lambda m, b: m(b["x"][0])) == {"couple": "probe"}


@pytest.mark.parametrize("size", [0, 1])
def test_probe_of_a_single_sample_says_nothing(size: int) -> None:
    assert found(Centred(), torch.randn(size, 3)) == {}


def test_attention_and_convolutions_do_not_couple_samples() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert found(layer, torch.randn(6, 5, 8)) == {}
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4))
    assert found(cnn, torch.randn(6, 3, 5, 5)) == {}
