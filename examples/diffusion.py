"""Diffusion with noise that is drawn with the batch: the same update however it is split.

    python examples/diffusion.py

A small UNet learns to denoise 8x8 images of bars. Noise and timesteps are drawn with the batch and
split with it. The usual loop draws them for each micro-batch, which gives every split of the batch
other noise. An average of the weights (EMA) is kept by the window, one step per update.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wholebatch as wb

STEPS = 200  # of noise


class UNet(nn.Module):
    """Two levels with a skip connection; the timestep is added to the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 16))
        self.down, self.deep = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, padding=1)
        self.norm, self.up = nn.GroupNorm(4, 32), nn.ConvTranspose2d(32, 16, 2, 2)
        self.out = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t.to(x.dtype)[:, None] / STEPS * torch.pi / 2
        high = self.down(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
        low = F.silu(self.norm(self.deep(F.silu(high))))
        out: Tensor = self.out(torch.cat([F.silu(high), self.up(low)], 1))
        return out


def before(micro_batch: int) -> Tensor:
    """Return the gradient of the usual loop, whose noise depends on the split."""
    model = UNet().double()
    torch.manual_seed(1)
    micros = bars(50, 3, torch.float64).split(micro_batch)
    for x in micros:
        noise, t = torch.randn_like(x), torch.randint(1, STEPS, (len(x),))
        (squared_error(model, x, noise, t).mean() / len(micros)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def with_noise(x: Tensor) -> dict[str, Tensor]:
    """Return the batch with noise and timesteps of its own."""
    return {"x": x, "noise": torch.randn_like(x), "t": torch.randint(1, STEPS, (len(x),))}


def loss(model: UNet, micro: dict[str, Tensor]) -> wb.Loss:
    error = squared_error(model, micro["x"], micro["noise"], micro["t"])
    return wb.Loss(error.sum(), error.numel())


def squared_error(model: UNet, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    kept = torch.cos(t.to(x.dtype) / STEPS * torch.pi / 2)[:, None, None, None]
    made = model(kept * x + (1 - kept**2).sqrt() * noise, t)
    return (made - noise).square()


def bars(number: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Images with one bright row or column."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.full((number, 1, 8, 8), -1.0, dtype=dtype)
    places = torch.randint(0, 8, (number,), generator=draw)
    across = torch.rand(number, generator=draw) < 0.5
    images[torch.arange(number)[across], 0, places[across]] = 1.0
    images[torch.arange(number)[~across], 0, :, places[~across]] = 1.0
    return images


def gradient(micro_batch: int) -> Tensor:
    """The gradient of one window of 50 images, in float64, from the same random state."""
    model = UNet().double()
    torch.manual_seed(1)
    train = wb.WholeBatch(model, None, loss=loss, micro_batch=micro_batch)
    train.gradient(with_noise(bars(50, 3, torch.float64)))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> dict[str, float]:
    whole = gradient(50)
    found = {
        f"split by {size}": float((gradient(size) - whole).norm() / whole.norm())
        for size in (1, 8, 17)
    }
    usual = before(50)
    found["usual loop"] = float((before(8) - usual).norm() / usual.norm())
    verdict = wb.verify(UNet(), loss, with_noise(bars(32, 4)), micro_batch=9)

    model = UNet()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=32, clip_norm=1.0, close=wb.Close(ema=ema)
    )
    first = train.step(with_noise(bars(128, 100))).loss
    for turn in range(100):
        train.step(with_noise(bars(128, turn)))
    held_out = bars(256, 1000)
    for name, one in (("last weights", model), ("EMA", copy.deepcopy(ema.module))):
        torch.manual_seed(5)
        with torch.no_grad():
            made = loss(one, with_noise(held_out))
        found[f"loss of the {name}"] = float(made.total) / float(made.units)
    for size in (1, 8, 17):
        print(f"split by {size:2}: gradient off by {found[f'split by {size}']:.1e}")
    print(f"wb.verify: {'the same update' if verdict.same else verdict}")
    print(f"loss at the first step {first:.3f}; on other images after 100 updates:", end=" ")
    print(f"{found['loss of the last weights']:.3f}, EMA {found['loss of the EMA']:.3f}")
    print(
        f"Shown: split by 8 the usual loop draws other noise (its gradient is another by "
        f"{found['usual loop']:.0%}, and right on average); with noise drawn with the batch the "
        f"gradient is the same to {found['split by 8']:.0e}."
    )
    found["first loss"], found["verified"] = first, float(verdict.same)
    return found


if __name__ == "__main__":
    main()
