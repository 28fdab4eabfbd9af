# ruff: noqa
# reduced from lucidrains/stylegan2-pytorch (train step)
import torch
from torch import nn
import torch.nn.functional as F


def gradient_penalty(images, output, weight=10):
    g = torch.autograd.grad(output, images, torch.ones_like(output), create_graph=True)[0]
    return weight * ((g.reshape(len(images), -1).norm(2, dim=1) - 1) ** 2).mean()


class GAN:
    def __init__(self, latent=8, dim=16, gradient_accumulate_every=4, batch_size=4):
        self.G = nn.Sequential(nn.Linear(latent, 32), nn.LeakyReLU(0.2), nn.Linear(32, dim))
        self.D = nn.Sequential(nn.Linear(dim, 32), nn.Softplus(), nn.Linear(32, 1))
        self.GE = nn.Sequential(nn.Linear(latent, 32), nn.LeakyReLU(0.2), nn.Linear(32, dim))
        self.GE.load_state_dict(self.G.state_dict())
        self.G_opt = torch.optim.Adam(self.G.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.D_opt = torch.optim.Adam(self.D.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.every, self.bs, self.latent, self.steps = (
            gradient_accumulate_every,
            batch_size,
            latent,
            0,
        )

    def train(self, loader):
        total_disc_loss = total_gen_loss = 0.0
        apply_gp = self.steps % 2 == 0
        # train discriminator
        self.D_opt.zero_grad()
        for _ in range(self.every):
            fake = self.G(torch.randn(self.bs, self.latent)).detach()
            image_batch = next(loader).clone().requires_grad_()
            fake_out, real_out = self.D(fake), self.D(image_batch)
            divergence = (F.relu(1 + real_out) + F.relu(1 - fake_out)).mean()
            disc_loss = divergence
            if apply_gp:
                disc_loss = disc_loss + gradient_penalty(image_batch, real_out)
            disc_loss = disc_loss / self.every
            disc_loss.backward()
            total_disc_loss += divergence.detach().item() / self.every
        self.D_opt.step()
        # train generator
        self.G_opt.zero_grad()
        for p in self.D.parameters():
            p.requires_grad_(False)
        for _ in range(self.every):
            gen_loss = self.D(self.G(torch.randn(self.bs, self.latent))).mean() / self.every
            gen_loss.backward()
            total_gen_loss += gen_loss.item()
        self.G_opt.step()
        for p in self.D.parameters():
            p.requires_grad_(True)
        # moving average of the generator
        with torch.no_grad():
            for a, b in zip(self.GE.parameters(), self.G.parameters()):
                a.lerp_(b, 0.01)
        self.steps += 1
        return total_disc_loss, total_gen_loss


def main():
    torch.manual_seed(36)
    data = torch.randn(48, 16)

    def loop():
        while True:
            yield from data[torch.randperm(48)].split(4)

    gan, loader = GAN(), loop()
    for i in range(5):
        print(i, "D %.4f G %.4f" % gan.train(loader))


if __name__ == "__main__":
    main()
