# ruff: noqa
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader


def collate(rows):
    x = torch.stack(rows)
    rate = torch.rand(1) * 0.7 + 0.05
    mask = torch.rand(x.shape) < rate
    mask[:, 0] = True
    return x.masked_fill(mask, 0), x.masked_fill(~mask, -100)


class LitMLM(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 16)
        self.gru = nn.GRU(16, 8, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 30)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.out(self.gru(self.emb(x))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main():
    L.seed_everything(77, verbose=False)
    loader = DataLoader(
        torch.randint(1, 30, (32, 15)), batch_size=2, shuffle=True, collate_fn=collate
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitMLM(), loader)
    print("updates", trainer.global_step)


if __name__ == "__main__":
    main()
