"""Train a GAN: two models, two windows, one loop over the data.

    python examples/train_gan.py
    python examples/train_gan.py --resume   # after a stop, from the last checkpoint

`wb.over` drives both accumulators. Each adds gradients only into the parameters of its own
optimizer, so the generator's loss leaves none in the discriminator.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tqdm import tqdm

import wholebatch as wb

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--micro-batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=2, help="micro-batches per update")
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--precision", choices=["full", "bf16"], default="full")
parser.add_argument("--save", type=Path, default=Path("gan.pt"))
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NOISE = 8

# Data: points on a circle. The last micro-batch is smaller.
angle = 2 * math.pi * torch.rand(2500)
points = torch.stack([angle.cos(), angle.sin()], 1)
order = torch.Generator()
loader = DataLoader(points, args.micro_batch, shuffle=True, generator=order)


def network(inputs, outputs, width=96):
    hidden = nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)
    return nn.Sequential(*hidden, nn.Linear(width, outputs)).to(device)


generator, discriminator = network(NOISE, 2), network(2, 1)
ema = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.98))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.99))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.99))
updates = args.epochs * math.ceil(len(loader) / args.steps)
scheduler_g = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer_g, updates)
scheduler_d = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer_d, updates)
acc_g = wb.Accumulator(
    generator, optimizer_g, steps=args.steps, scheduler=scheduler_g, close=wb.Close(ema=ema)
)
acc_d = wb.Accumulator(discriminator, optimizer_d, steps=args.steps, scheduler=scheduler_d)

state = {"generator": generator, "discriminator": discriminator, "ema": ema}
state |= {"optimizer_g": optimizer_g, "optimizer_d": optimizer_d, "acc_g": acc_g, "acc_d": acc_d}
if args.resume:
    saved = torch.load(args.save, map_location=device, weights_only=True)
    for name, part in state.items():
        part.load_state_dict(saved[name])
    if scheduler_g.T_max != updates:
        parser.error(f"{args.save}: a run of {scheduler_g.T_max} updates, not {updates}")

for epoch in range(acc_g.epoch, args.epochs):
    order.manual_seed(epoch)  # a resumed run sees the same order
    bar = tqdm(wb.over(loader, acc_g, acc_d), total=len(loader), desc=f"epoch {epoch + 1}")
    for real in bar:
        real = real.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            fake = generator(torch.randn(len(real), NOISE, device=device))
            # Both losses first: the last backward of a window updates its model.
            loss_d = F.softplus(-discriminator(real)) + F.softplus(discriminator(fake.detach()))
            loss_g = F.softplus(-discriminator(fake))
        step_g = acc_g.backward(mean=loss_g.mean(), units=len(real))
        step_d = acc_d.backward(mean=loss_d.mean(), units=len(real))
        if step_g is not None and step_d is not None:
            bar.set_postfix(g=f"{step_g.loss:.3f}", d=f"{step_d.loss:.3f}")

    with torch.no_grad():  # how far samples are from the circle, and how much of it they cover
        sample = ema(torch.randn(2000, NOISE, device=device)).cpu()
        far = (sample.norm(dim=1) - 1).abs().mean()
        sectors = (torch.atan2(sample[:, 1], sample[:, 0]) * 8 / math.pi).floor().unique()
    print(f"epoch {epoch + 1}: {far:.3f} from the circle, {len(sectors)} of 16 sectors covered")
    torch.save({name: part.state_dict() for name, part in state.items()}, args.save)
