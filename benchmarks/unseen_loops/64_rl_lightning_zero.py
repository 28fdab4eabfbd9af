# ruff: noqa
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class OfflinePG(L.LightningModule):
    """Advantage-weighted regression on logged transitions."""

    def __init__(self, accumulate=4):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.pi = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 3))

    def training_step(self, batch, batch_idx):
        obs, act, adv = batch
        opt = self.optimizers()
        opt.zero_grad()
        logp = torch.log_softmax(self.pi(obs), -1).gather(1, act[:, None]).squeeze(1)
        loss = -(adv.exp().clamp(max=20) * logp).mean() / self.accumulate
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accumulate == 0:
            opt.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(79, verbose=False)
    ds = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)), torch.randn(64))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(OfflinePG(), DataLoader(ds, batch_size=4, shuffle=True))
    print("updates", trainer.global_step)


if __name__ == "__main__":
    main()
