"""FSDP2 in `wholebatch train`: the first values of a model that is built on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wholebatch.cli.sharded_start import _Recorder
from wholebatch.errors import RecipeError


class Own(nn.Module):
    """First values of many kinds: a constructor's, a loop's afterwards, constants, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=2)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 6))
        self.scale = nn.Parameter(torch.full((4,), 0.5) * torch.arange(4))
        self.register_buffer("mask", torch.ones(3, 3).tril())
        self.turn = nn.Parameter(nn.init.orthogonal_(torch.empty(4, 4)))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.constant_(module.bias, 0.25)
        self.layers[2].weight = self.embedding.weight
        self.double()


def test_operations_of_a_constructor_are_run_again() -> None:
    recorder = _Recorder()
    with recorder.watching():
        meta = Own()
    found = {}
    for name, tensor in [*meta.named_parameters(), *meta.named_buffers()]:
        assert tensor.is_meta
        found[name] = recorder.replay(tensor.detach(), name)
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
    assert found["scale"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert torch.equal(found["mask"], torch.ones(3, 3).tril().double())
    assert found["layers.0.bias"].tolist() == [0.25] * 4
    assert 0 < float(found["layers.0.weight"].std()) < 0.05
    turn = found["turn"]
    assert torch.allclose(turn @ turn.T, torch.eye(4).double(), atol=1e-6)
    assert found["layers.1.num_batches_tracked"].item() == 0
    assert found["layers.1.running_var"].tolist() == [1.0] * 4
    assert found["embedding.weight"][2].abs().sum() == 0  # the row of the padding
    assert float(found["embedding.weight"].std()) > 0.3


def test_values_from_a_list_are_refused() -> None:
    recorder = _Recorder()
    with recorder, torch.device("meta"):
        value = torch.tensor([1.0, 2.0])  # without _Constants, as an array would be
    with pytest.raises(
        RecipeError, match=r"the initial values of mean are not known.*torch.arange"
    ):
        recorder.replay(value, "mean")
