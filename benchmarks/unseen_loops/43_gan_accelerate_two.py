# ruff: noqa
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    torch.manual_seed(64)
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    G = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 10))
    D = nn.Sequential(nn.Linear(10, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3)
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3)
    loader = DataLoader(torch.randn(64, 10), batch_size=4, shuffle=True)
    G, D, opt_g, opt_d, loader = accelerator.prepare(G, D, opt_g, opt_d, loader)
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        for real in loader:
            with accelerator.accumulate(G, D):
                fake = G(torch.randn(len(real), 6))
                d_loss = bce(D(real), torch.ones(len(real), 1)) + bce(
                    D(fake.detach()), torch.zeros(len(real), 1)
                )
                accelerator.backward(d_loss)
                D.requires_grad_(False)
                g_loss = bce(D(fake), torch.ones(len(real), 1))
                accelerator.backward(g_loss)
                D.requires_grad_(True)
                opt_d.step()
                opt_g.step()
                opt_d.zero_grad()
                opt_g.zero_grad()
        print(epoch, d_loss.item(), g_loss.item())


if __name__ == "__main__":
    main()
