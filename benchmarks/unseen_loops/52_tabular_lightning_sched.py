# ruff: noqa
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.huber_loss(self.net(x).squeeze(-1), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.lr)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, self.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(73, verbose=False)
    ds = TensorDataset(torch.randn(72, 5), torch.randn(72))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        accumulate_grad_batches=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regressor(), DataLoader(ds, batch_size=6, shuffle=True))
    print(trainer.global_step, trainer.callback_metrics)


if __name__ == "__main__":
    main()
