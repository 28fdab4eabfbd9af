# ruff: noqa
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUM = 4


class SegModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        img, mask = batch
        loss = nn.functional.cross_entropy(self.net(img), mask)
        self.seen.append(loss.item())
        return loss / ACCUM

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} loss {sum(self.seen) / len(self.seen):.4f}")
        self.seen.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    L.seed_everything(76, verbose=False)
    ds = TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(0, 2, (32, 8, 8)))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=ACCUM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(SegModule(), DataLoader(ds, batch_size=2, shuffle=True))


if __name__ == "__main__":
    main()
