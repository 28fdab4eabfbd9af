# ruff: noqa
import copy

import torch
from torch import nn

import wholebatch as wb


def main():
    torch.manual_seed(54)
    model = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    acc = wb.Accumulator(model, optimizer, steps=3, scheduler=scheduler)
    data = torch.randn(52, 8)
    for epoch in range(2):
        for x in acc.over(list(data[torch.randperm(52)].split(4))):
            t = torch.rand(len(x), 1)
            noise = torch.randn_like(x)
            pred = model(torch.cat([(1 - t) * x + t * noise, t], 1))
            step = acc.backward(mean=(pred - (noise - x)).pow(2).mean(), units=len(x))
            if step is not None:
                with torch.no_grad():
                    for e, p in zip(ema.parameters(), model.parameters()):
                        e.lerp_(p, 0.05)
        print(epoch, float(step.loss) if step is not None else "")


if __name__ == "__main__":
    main()
