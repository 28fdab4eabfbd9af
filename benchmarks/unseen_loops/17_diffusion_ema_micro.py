# ruff: noqa
import copy

import torch
from torch import nn


class EMA:
    def __init__(self, model, beta=0.9):
        self.beta = beta
        self.model = copy.deepcopy(model).eval()
        for p in self.model.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.mul_(self.beta).add_(p, alpha=1 - self.beta)


class Denoiser(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, 64), nn.SiLU(), nn.Linear(64, dim))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None].float() / 100], 1))


def q_sample(x, t, noise, alphas):
    a = alphas[t][:, None]
    return a.sqrt() * x + (1 - a).sqrt() * noise


def main():
    torch.manual_seed(5)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    data = torch.randn(64, 16)
    model = Denoiser()
    ema = EMA(model)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    accumulate, bs = 4, 4
    for epoch in range(2):
        running = 0.0
        for n, x in enumerate(data[torch.randperm(64)].split(bs), start=1):
            t = torch.randint(0, 100, (len(x),))
            noise = torch.randn_like(x)
            pred = model(q_sample(x, t, noise, alphas), t)
            loss = nn.functional.mse_loss(pred, noise)
            (loss / accumulate).backward()
            running += loss.item()
            if n % accumulate == 0:
                opt.step()
                opt.zero_grad(set_to_none=True)
            ema.update(model)
        print("epoch", epoch, "mse", round(running / n, 4))


if __name__ == "__main__":
    main()
