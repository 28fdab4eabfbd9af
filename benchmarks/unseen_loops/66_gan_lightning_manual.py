# ruff: noqa
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader


class LitGAN(L.LightningModule):
    def __init__(self, every=4):
        super().__init__()
        self.automatic_optimization = False
        self.every = every
        self.G = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 8))
        self.D = nn.Sequential(nn.Linear(8, 20), nn.LeakyReLU(0.2), nn.Linear(20, 1))

    def training_step(self, real, batch_idx):
        g_opt, d_opt = self.optimizers()
        fake = self.G(torch.randn(len(real), 5))

        self.toggle_optimizer(d_opt)
        d_loss = (torch.relu(1 - self.D(real)) + torch.relu(1 + self.D(fake.detach()))).mean()
        self.manual_backward(d_loss / self.every)
        self.untoggle_optimizer(d_opt)

        self.toggle_optimizer(g_opt)
        g_loss = -self.D(self.G(torch.randn(len(real), 5))).mean()
        self.manual_backward(g_loss / self.every)
        self.untoggle_optimizer(g_opt)

        if (batch_idx + 1) % self.every == 0:
            d_opt.step()
            g_opt.step()
            d_opt.zero_grad()
            g_opt.zero_grad()

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.G.parameters(), 1e-3, betas=(0.5, 0.9)),
            torch.optim.Adam(self.D.parameters(), 1e-3, betas=(0.5, 0.9)),
        )


def main():
    L.seed_everything(74, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitGAN(), DataLoader(torch.randn(48, 8), batch_size=4, shuffle=True))
    print("done")


if __name__ == "__main__":
    main()
