# ruff: noqa
# reduced from lucidrains/denoising-diffusion-pytorch (Trainer)
import copy

import torch
import torch.nn.functional as F
from torch import nn


def cycle(dl):
    while True:
        for data in dl:
            yield data


class GaussianDiffusion(nn.Module):
    def __init__(self, net, timesteps=40):
        super().__init__()
        self.net, self.T = net, timesteps
        self.register_buffer("abar", torch.cumprod(1 - torch.linspace(1e-4, 0.03, timesteps), 0))

    def forward(self, x):
        t = torch.randint(0, self.T, (x.shape[0],))
        noise = torch.randn_like(x)
        a = self.abar[t][:, None]
        pred = self.net(torch.cat([a.sqrt() * x + (1 - a).sqrt() * noise, t[:, None] / self.T], 1))
        return F.mse_loss(pred, noise)


class Trainer:
    def __init__(
        self,
        model,
        data,
        *,
        batch_size=4,
        gradient_accumulate_every=4,
        lr=1e-3,
        num_steps=6,
        ema_decay=0.95,
    ):
        self.model = model
        self.dl = cycle(torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True))
        self.gradient_accumulate_every = gradient_accumulate_every
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.ema, self.decay = copy.deepcopy(model), ema_decay
        self.step, self.train_num_steps = 0, num_steps

    def update_ema(self):
        with torch.no_grad():
            for e, p in zip(self.ema.parameters(), self.model.parameters()):
                e.lerp_(p, 1 - self.decay)

    def train(self):
        while self.step < self.train_num_steps:
            total_loss = 0.0
            for _ in range(self.gradient_accumulate_every):
                data = next(self.dl)
                loss = self.model(data)
                loss = loss / self.gradient_accumulate_every
                total_loss += loss.item()
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.update_ema()
            print(f"loss: {total_loss:.4f}")


if __name__ == "__main__":
    torch.manual_seed(35)
    net = nn.Sequential(nn.Linear(11, 48), nn.SiLU(), nn.Linear(48, 10))
    Trainer(GaussianDiffusion(net), torch.randn(32, 10)).train()
