# ruff: noqa
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitGNN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 1)

    def forward(self, x, adj):
        h = torch.relu(self.a(adj @ x))
        h = torch.relu(self.b(adj @ h))
        return self.o(h.mean(1)).squeeze(-1)

    def training_step(self, batch, _):
        x, adj, y = batch
        return nn.functional.l1_loss(self(x, adj), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    L.seed_everything(78, verbose=False)
    x, adj, y = torch.randn(36, 5, 4), (torch.rand(36, 5, 5) > 0.5).float(), torch.randn(36)
    loader = DataLoader(TensorDataset(x, adj, y), batch_size=4, shuffle=True)  # 9 batches
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitGNN(), loader)
    print("updates", trainer.global_step)


if __name__ == "__main__":
    main()
