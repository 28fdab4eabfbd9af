"""`verify` on models and losses of the usual kinds: right where they are, and why where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import mlp, samples

F32 = torch.float32
BATCH = samples(13, dtype=F32)
Kind: TypeAlias = tuple[Callable[[], nn.Module], Any, Callable[[], Any], dict[str, Any], list[str]]


def network(outputs: int) -> nn.Module:
    return mlp(classes=outputs, dtype=F32)


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (13, 6, 6), generator=generator)
    unknown = torch.rand(13, 6, 6, generator=generator) < torch.linspace(0, 0.9, 13).view(-1, 1, 1)
    x = torch.randn(13, 3, 6, 6, generator=generator)
    return {"x": x, "y": labels.masked_fill(unknown, 255)}


def segments() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))


def dice(model: nn.Module, micro: Any) -> wb.Loss:
    chance, hit = model(micro["x"]).softmax(1)[:, 0], (micro["y"] == 0).float()
    off = 1 - (2 * (chance * hit).sum() + 1) / (chance.sum() + hit.sum() + 1)
    return wb.mean_loss(off, len(hit))


class Words(nn.Module):
    """A recurrent language model with dropout between its layers, time first inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(20, 8)
        self.body = nn.LSTM(8, 12, 2, dropout=0.2)
        self.head = nn.Linear(12, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(tokens.T))[0]).transpose(0, 1)
        return logits


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 20, (13, 7), generator=generator)
    hidden = torch.rand(13, 7, generator=generator) < torch.linspace(0.1, 0.9, 13)[:, None]
    return {"x": x, "y": x.masked_fill(~hidden, -100)}


def masked(model: nn.Module, micro: Any) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"].masked_fill(micro["y"] != -100, 0)), micro["y"])


KINDS: dict[str, Kind] = {
    "dice": (segments, dice, images, {"batchnorm": "freeze"}, ["a loss that does not decompose"]),
    # Exact BatchNorm runs the batch undivided, so that no loss is divided.
    "dice, exact": (segments, dice, images, {}, []),
    "recurrent": (Words, masked, tokens, {}, []),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_usual_kinds(name: str) -> None:
    make, loss, batch, options, kinds = KINDS[name]
    verdict = wb.verify(make(), loss, batch(), micro_batch=4, **options)
    assert [cause.name for cause in verdict.causes] == kinds, verdict
    assert verdict.same is not bool(kinds)
    if not kinds and verdict.float64 is not None:
        assert verdict.float64.distance <= 1e-12


class Detector(nn.Module):
    """Losses in training mode, detections in evaluation mode, and images of any size."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Conv2d(3, 8, 3, padding=1)
        self.box = nn.Linear(8, 4)
        self.draws = draws

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        features = [self.body(image[None]).relu().mean((0, 2, 3)) for image in images]
        boxes = self.box(torch.stack(features))
        if not self.training:
            return [{"boxes": box[None]} for box in boxes]
        assert targets is not None
        halves = [torch.rand(len(images), 2) if self.draws else torch.ones(1, 2) for _ in range(2)]
        errors = [(b - t["boxes"]).abs().sum() for b, t in zip(boxes, targets, strict=True)]
        drawn = (boxes * torch.cat(halves, 1)).square().sum()
        return {"box": torch.stack(errors).mean(), "sampled": drawn / len(images)}


@pytest.mark.parametrize("draws", [False, True])
def test_a_detector(draws: bool) -> None:
    """Switching the draws off by evaluation mode takes its losses away: that is no way."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(3, 8 + i % 3, 9 + i % 2, generator=generator) for i in range(9)]
    targets = [{"boxes": torch.rand(1 + i % 3, 4, generator=generator)} for i in range(9)]

    def loss(model: nn.Module, micro: Any) -> wb.Loss:
        losses = model(micro["images"], micro["targets"])
        return wb.mean_loss(sum(losses.values()), len(micro["images"]))

    batch = {"images": images, "targets": targets}
    verdict = wb.verify(Detector(draws=draws), loss, batch, micro_batch=4)
    assert verdict.same is not draws
    assert [cause.name for cause in verdict.causes] == (["randomness"] if draws else [])


def by_class(model: nn.Module, micro: Any) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


@pytest.mark.parametrize("features", [5, 40])
def test_power_iterations_are_a_state(features: int) -> None:
    """They move the gradient and hardly the loss; where they have converged, only float64 sees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(features, features)))
    batch = samples(37, features, dtype=F32)
    verdict = wb.verify(model, by_class, batch, micro_batch=5)
    assert not verdict.same
    assert verdict.causes[0].name == "a stateful module", verdict
    assert verdict.causes[0].where == ("0.parametrizations.weight.0",)


def test_a_loss_that_holds_the_model_itself() -> None:
    """A copy in float64 is not what such a loss runs: a note, no refusal."""
    model = network(3)
    verdict = wb.verify(
        model, lambda _, micro: wb.cross_entropy(model(micro["x"]), micro["y"]), BATCH
    )
    assert verdict.same
    assert "not run in float64" in verdict.notes[0]


def test_a_frozen_parameter_in_the_optimizer_is_left_out() -> None:
    def squared_mean(model: nn.Module, micro: Any) -> wb.Loss:  # it does not decompose
        losses = F.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
        return wb.mean_loss(losses.mean().square(), len(losses))

    model = network(4)
    next(model.parameters()).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verdict = wb.verify(model, squared_mean, BATCH, micro_batch=3, optimizer=optimizer)
    assert not verdict.same
    assert verdict.causes


class FixedConfig(dict[str, Any]):
    """A mapping that refuses to be written to, as the `FrozenDict` of diffusers."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("it cannot be changed")

    __setitem__ = __delitem__ = clear = update = pop = setdefault = popitem = _refuse


def test_a_configuration_that_cannot_be_written_is_left_alone() -> None:
    class Configured(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 4)
            self.config = FixedConfig(scale=2.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.config["scale"]

    model = Configured()
    config = model.config

    def loss(model: nn.Module, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    assert wb.verify(model, loss, BATCH, micro_batch=4).same
    assert model.config is config
