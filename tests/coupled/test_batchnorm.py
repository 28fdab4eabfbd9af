"""The policies: each does what its row of the table says, and leaves what it found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wholebatch.coupled.batchnorm.policies import choose
from wholebatch.coupled.normalisation_layers import fixed_statistics
from wholebatch.errors import UnsupportedError


def data(size: int = 10, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x * torch.linspace(0.5, 2, size, dtype=torch.float64).view(-1, 1, 1, 1) + 1


def first_layer(**options: Any) -> nn.Module:
    """The norm comes first, so what it sees does not depend on how others normalise."""
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, **options), nn.ReLU()).double()


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return all(torch.allclose(got[n], want[n], rtol=1e-12, atol=1e-13) for n in want)


def test_refuse_names_the_layers() -> None:
    with pytest.raises(UnsupportedError, match=r"BatchNorm in '1': .*batchnorm=\"exact\""):
        choose("refuse", first_layer())
    layers = [nn.BatchNorm1d(2) for _ in range(5)]
    with pytest.raises(UnsupportedError, match="'0', '1', '2' and 2 more"):
        choose("refuse", nn.Sequential(*layers))


def test_refuse_names_instance_norms_with_running_statistics() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True))
    with pytest.raises(UnsupportedError, match="InstanceNorm in '0'"):
        choose("refuse", model)
    choose("allow", model)


@pytest.mark.parametrize("tracks", [True, False])
def test_fixed_statistics_couple_no_samples(tracks: bool) -> None:
    model = first_layer(track_running_stats=tracks)
    before = statistics(model)
    with fixed_statistics([("1", model[1])]):
        whole = model(data())
        parts = torch.cat([model(part) for part in data().split([3, 7])])
    assert torch.allclose(whole, parts, rtol=1e-13, atol=1e-13)
    assert model[1].training
    assert close(statistics(model), before)
    assert not torch.allclose(model(data()), whole)
