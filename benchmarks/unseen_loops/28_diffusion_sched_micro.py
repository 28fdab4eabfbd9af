# ruff: noqa
import math

import torch
from torch import nn


class Eps(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(50, 16)
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x, t):
        h = self.conv1(x) + self.time(t)[:, :, None, None]
        return self.conv2(h.relu())


def cosine_with_warmup(opt, warmup, total):
    def f(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1, (step - warmup) / max(1, total - warmup))))

    return torch.optim.lr_scheduler.LambdaLR(opt, f)


def main():
    torch.manual_seed(21)
    imgs = torch.rand(48, 1, 8, 8) * 2 - 1
    betas = torch.linspace(1e-4, 0.05, 50)
    abar = torch.cumprod(1 - betas, 0)
    model = Eps()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    grad_accum, bs, epochs = 4, 4, 2
    num_updates = epochs * (len(imgs) // bs) // grad_accum
    sched = cosine_with_warmup(opt, warmup=1, total=num_updates)
    for epoch in range(epochs):
        for step, x0 in enumerate(imgs[torch.randperm(48)].split(bs)):
            t = torch.randint(0, 50, (bs,))
            eps = torch.randn_like(x0)
            a = abar[t].view(-1, 1, 1, 1)
            loss = nn.functional.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * eps, t), eps)
            (loss / grad_accum).backward()
            if (step + 1) % grad_accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            sched.step()
        print(f"epoch {epoch} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
