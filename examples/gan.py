"""A GAN: two models, two windows, one loop over the data.

    python examples/gan.py

The loss of the generator flows through the discriminator. In a plain accumulation loop its
gradient stays there, and is added to that of the discriminator: `zero_grad()` between the two
losses would also drop the micro-batches before. `wb.over` drives one accumulator per model, and
each adds only into the parameters of its own optimizer. Compute both losses before the first
`backward`: the last `backward` of a window updates the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import wholebatch as wb

Pair = tuple[Tensor, Tensor]  # real points, and noise for as many false ones
STEPS = 4


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2)).double()
        self.judge = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).double()
        self.make_step = torch.optim.SGD(self.make.parameters(), lr=0.1)
        self.judge_step = torch.optim.SGD(self.judge.parameters(), lr=0.1)


def losses(gan: Gan, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of the discriminator and of the generator, one number per sample."""
    fake = gan.make(noise)
    told_apart = F.softplus(-gan.judge(real)) + F.softplus(gan.judge(fake.detach()))
    return told_apart, F.softplus(-gan.judge(fake))


def before(gan: Gan, loader: list[Pair]) -> None:
    for i, (real, noise) in enumerate(loader):
        judged, fooled = losses(gan, real, noise)
        (judged.mean() / STEPS).backward()
        (fooled.mean() / STEPS).backward()  # also adds into the discriminator
        if (i + 1) % STEPS == 0:
            for optimizer in (gan.judge_step, gan.make_step):
                optimizer.step()
                optimizer.zero_grad()


def after(gan: Gan, loader: list[Pair]) -> None:
    judges = wb.Accumulator(gan.judge, gan.judge_step, steps=STEPS)
    makers = wb.Accumulator(gan.make, gan.make_step, steps=STEPS)
    for real, noise in wb.over(loader, judges, makers):
        judged, fooled = losses(gan, real, noise)
        makers.backward(fooled.sum(), units=len(noise))
        judges.backward(judged.sum(), units=len(real))


def undivided(gan: Gan, loader: list[Pair]) -> None:
    """Update both models from the whole window, each from its own loss."""
    judged, fooled = losses(gan, *(torch.cat(part) for part in zip(*loader, strict=True)))
    judged.mean().backward(inputs=list(gan.judge.parameters()), retain_graph=True)
    fooled.mean().backward(inputs=list(gan.make.parameters()))
    gan.judge_step.step()
    gan.make_step.step()


def points() -> list[Pair]:
    """One window of points on a circle; its last micro-batch is smaller."""
    draw = torch.Generator().manual_seed(1)
    sizes = [16, 16, 16, 6]
    angle = 2 * torch.pi * torch.rand(sum(sizes), 1, generator=draw, dtype=torch.float64)
    real = torch.cat([angle.sin(), angle.cos()], 1)
    noise = torch.randn(sum(sizes), 8, generator=draw, dtype=torch.float64)
    return list(zip(real.split(sizes), noise.split(sizes), strict=True))


def moved(part: nn.Module, start: nn.Module) -> Tensor:
    return (
        parameters_to_vector(part.parameters()) - parameters_to_vector(start.parameters())
    ).detach()


def main() -> dict[str, float]:
    start, loader = Gan(), points()
    undivided(right := Gan(), loader)
    errors = {}
    for name, loop in (("before", before), ("after", after)):
        loop(gan := Gan(), loader)
        for part in ("judge", "make"):
            wanted = moved(getattr(right, part), getattr(start, part))
            found = moved(getattr(gan, part), getattr(start, part))
            errors[f"{name}, {part}"] = float((found - wanted).norm() / wanted.norm())
    print(
        f"Shown: the discriminator's update is off by {errors['before, judge']:.0%} and the "
        f"generator's by {errors['before, make']:.0%} in the usual loop; by "
        f"{errors['after, judge']:.0e} and {errors['after, make']:.0e} with wb.over."
    )
    return errors


if __name__ == "__main__":
    main()
