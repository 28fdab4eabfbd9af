# ruff: noqa
import torch
from torch import nn


class WGAN:
    def __init__(self, z=6, x=10, accumulate_every=4):
        self.z, self.k = z, accumulate_every
        self.G = nn.Sequential(nn.Linear(z, 24), nn.ReLU(), nn.Linear(24, x))
        self.D = nn.Sequential(nn.Linear(x, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
        self.g_opt = torch.optim.RMSprop(self.G.parameters(), lr=5e-4)
        self.d_opt = torch.optim.RMSprop(self.D.parameters(), lr=5e-4)

    def train_step(self, loader):
        self.d_opt.zero_grad()
        d_total = 0.0
        for _ in range(self.k):
            real = next(loader)
            fake = self.G(torch.randn(len(real), self.z)).detach()
            d_loss = (torch.relu(1 - self.D(real)) + torch.relu(1 + self.D(fake))).mean() / self.k
            d_loss.backward()
            d_total += d_loss.item()
        self.d_opt.step()

        self.D.requires_grad_(False)
        self.g_opt.zero_grad()
        g_total = 0.0
        for _ in range(self.k):
            g_loss = -self.D(self.G(torch.randn(4, self.z))).mean()
            g_loss.backward()
            g_total += g_loss.item() / self.k
        self.g_opt.step()
        self.D.requires_grad_(True)
        return d_total, g_total


def cycle(data, bs):
    while True:
        for b in data[torch.randperm(len(data))].split(bs):
            yield b


def main():
    torch.manual_seed(27)
    loader = cycle(torch.randn(40, 10) + 2, 4)
    gan = WGAN()
    for step in range(5):
        print("step %d D %.3f G %.3f" % (step, *gan.train_step(loader)))


if __name__ == "__main__":
    main()
