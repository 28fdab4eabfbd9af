"""Diffusion: noise that is drawn with the batch is split with it, and the update stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import EXACT, Seen, distance

Batch = dict[str, Tensor]


class UNet(nn.Module):
    """Two levels with a skip connection, GroupNorm, and the timestep added to every level."""

    def __init__(self, norm: Any = lambda c: nn.GroupNorm(2, c)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Linear(1, 8)
        self.down, self.deep = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(16, 1, 3, padding=1)
        self.norm = norm(8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        high = self.down(x) + self.time(t[:, None])[:, :, None, None]
        low = F.silu(self.norm(self.deep(F.silu(high))))
        out: Tensor = self.out(torch.cat([high, self.up(low)], 1))
        return out


class DiT(nn.Module):
    """Patches of an image through a block whose norm is scaled by timestep and label."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.label = nn.Linear(4, 16), nn.Embedding(4, 16)
        self.condition = nn.Linear(17, 48)
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.read = nn.Linear(16, 4)

    def forward(self, x: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        n = len(x)
        label = torch.zeros(n, dtype=torch.long) if label is None else label
        tokens = x.view(n, 4, 2, 4, 2).transpose(2, 3).reshape(n, 16, 4)
        scale, shift, gate = self.condition(torch.cat([self.label(label), t[:, None]], 1)).chunk(
            3, -1
        )
        hidden = self.patch(tokens)
        inner = self.norm(hidden) * (1 + scale[:, None]) + shift[:, None]
        hidden = hidden + gate[:, None] * self.mix(inner, inner, inner, need_weights=False)[0]
        out: Tensor = self.read(hidden).view(n, 4, 4, 2, 2).transpose(2, 3).reshape(x.shape)
        return out


def images(number: int = 13, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 1, 8, 8, generator=generator, dtype=dtype)
    return {
        "x": x,
        "label": torch.randint(1, 4, (number,), generator=generator),
        "noise": torch.randn(x.shape, generator=generator, dtype=dtype),
        "t": torch.rand(number, generator=generator, dtype=dtype),
        "keep": torch.rand(number, generator=generator) >= 0.3,
    }


def by_unet(model: Any, micro: Batch) -> wb.Loss:
    """Denoising at a drawn timestep (DDPM)."""
    x, noise, t = micro["x"], micro["noise"], micro["t"]
    kept = torch.cos(t * torch.pi / 2)[:, None, None, None]
    made = model(kept * x + (1 - kept**2).sqrt() * noise, t)
    return wb.Loss((made - noise).square().sum(), len(x))


def by_dit(model: Any, micro: Batch) -> wb.Loss:
    """Flow matching, with labels dropped for guidance."""
    x, noise, t = micro["x"], micro["noise"], micro["t"]
    label = micro["label"].where(micro["keep"], 0)
    at = t[:, None, None, None]
    return wb.Loss(
        (model((1 - at) * noise + at * x, t, label) - (x - noise)).square().sum(), len(x)
    )


CASES = [(UNet, by_unet), (DiT, by_dit)]


@pytest.mark.parametrize(("make", "loss"), CASES)
@pytest.mark.parametrize("micro_batch", [1, 4, 5, 12])
def test_the_update_is_that_of_the_undivided_batch(make: Any, loss: Any, micro_batch: int) -> None:
    model, batch = make().double(), images()
    whole = loss(model, batch)
    mean = whole.total / whole.units
    reference = torch.autograd.grad(mean, list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro_batch)
    step = train.step(batch)
    assert distance(seen.gradients[0], reference) <= EXACT
    assert step.loss == pytest.approx(mean.item(), rel=EXACT)


@pytest.mark.parametrize(("make", "loss"), CASES)
def test_verify_passes(make: Any, loss: Any) -> None:
    verdict = wb.verify(make().double(), loss, images(), micro_batch=4)
    assert verdict.same, verdict
    assert not verdict.causes
