"""Checkpointed blocks give the same gradients, buffers and names in less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.memory.models import GPT, images, loss, mlp, tokens
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.memory import MemoryMeter, predict_peak
from wholebatch.memory.activation_checkpointing import (
    checkpointed,
    is_checkpointed,
    repeated_blocks,
    with_checkpoints,
)
from wholebatch.memory.plain_window import PlainWindow


class Bottleneck(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels, momentum=None)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        result: Tensor = (x + scale * self.drop(self.norm2(self.conv2(y)))).relu()
        return result


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.stages = nn.Sequential(
            nn.Sequential(Bottleneck(8), Bottleneck(8)), nn.Sequential(Bottleneck(8))
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return result


def test_finds_the_outermost_repeated_blocks() -> None:
    assert repeated_blocks(GPT(layers=3)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert repeated_blocks(ResNet()) == ["stages.0.0", "stages.0.1", "stages.1.0"]
    assert repeated_blocks(nn.Transformer(8, 2, 2, 2, 16, batch_first=True)) == [
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
    ]
    assert repeated_blocks(mlp()) == []


@pytest.mark.parametrize(
    "make, batch",
    [(lambda: GPT(dropout=0.3), tokens), (ResNet, images)],
    ids=["gpt-dropout", "resnet-batchnorm-dropout"],
)
def test_same_numbers(make: type[nn.Module], batch: type) -> None:
    torch.manual_seed(0)
    plain = make().double()
    checkpointed = copy.deepcopy(plain)
    with_checkpoints(checkpointed)
    micro = {k: v.double() if v.is_floating_point() else v for k, v in batch(4).items()}  # type: ignore[attr-defined]
    for model in (plain, checkpointed):
        torch.manual_seed(1)
        for _ in range(2):
            loss(model, micro).total.backward()
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]
    for (name, a), b in zip(plain.named_buffers(), checkpointed.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_saves_memory_and_is_predicted_to_the_byte() -> None:
    model = GPT(layers=4)
    micro = tokens(8)
    before = predict_peak(model, loss, micro).by_category["activations"]
    with_checkpoints(model)
    predicted = predict_peak(model, loss, micro)
    assert predicted.by_category["activations"] < before / 2
    with MemoryMeter(model=model) as meter:
        window = PlainWindow(model, loss)
        window.run([micro])
        meter.reset_peak()
        window.run([micro])
    assert predicted.by_category == meter.peak_by_category


def test_names_types_and_saved_weights_stay() -> None:
    model = GPT()
    before = model.state_dict()
    block_class = type(model.blocks[0])
    with checkpointed(model):
        assert list(model.state_dict()) == list(before)
        assert isinstance(model.blocks[0], block_class)
        model.load_state_dict(before)
        twin = copy.deepcopy(model)
        assert is_checkpointed(twin.blocks[1])
    assert type(model.blocks[0]) is block_class
    assert not is_checkpointed(model.blocks[1])


def test_refuses_what_it_cannot_find() -> None:
    with pytest.raises(UnsupportedError, match="Sequential has no repeated blocks"):
        with_checkpoints(mlp())
    with pytest.raises(OptionError, match=r"GPT has no module named 'blocks\.9'"):
        with_checkpoints(GPT(), ["blocks.9"])


def test_finds_the_same_blocks_again_once_they_are_checkpointed() -> None:
    model = GPT()
    assert with_checkpoints(model) == with_checkpoints(model) == repeated_blocks(model)
