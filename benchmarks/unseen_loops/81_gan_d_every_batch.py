# ruff: noqa
import torch
import torch.nn as nn

nz, accum = 8, 4


def make():
    g = nn.Sequential(nn.Linear(nz, 32), nn.ReLU(), nn.Linear(32, 12))
    d = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return g, d


def main():
    torch.manual_seed(6)
    netG, netD = make()
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real_data = torch.randn(64, 12) * 0.5 + 1
    for epoch in range(2):
        for i, real in enumerate(real_data.split(4)):
            b = real.size(0)
            # discriminator
            for p in netD.parameters():
                p.requires_grad_(True)
            fake = netG(torch.randn(b, nz))
            errD = criterion(netD(real), torch.ones(b, 1)) + criterion(
                netD(fake.detach()), torch.zeros(b, 1)
            )
            (errD / accum).backward()
            optD.step()
            optD.zero_grad()
            # generator
            for p in netD.parameters():
                p.requires_grad_(False)
            errG = criterion(netD(fake), torch.ones(b, 1))
            (errG / accum).backward()
            if (i + 1) % accum == 0:
                optG.step()
                optG.zero_grad()
        print(f"[{epoch}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")


if __name__ == "__main__":
    main()
