# ruff: noqa
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MLP(nn.Module):
    def __init__(self, cats=(5, 7), num=6):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(c, 4) for c in cats)
        self.net = nn.Sequential(nn.Linear(8 + num, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, xc, xn):
        e = [emb(xc[:, i]) for i, emb in enumerate(self.embs)]
        return self.net(torch.cat(e + [xn], 1)).squeeze(1)


def main(epochs=3, accumulate=4):
    torch.manual_seed(25)
    n = 96
    xc = torch.stack([torch.randint(0, 5, (n,)), torch.randint(0, 7, (n,))], 1)
    xn, y = torch.randn(n, 6), torch.randint(0, 2, (n,)).float()
    loader = DataLoader(TensorDataset(xc, xn, y), batch_size=8, shuffle=True)
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=epochs * len(loader)
    )
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(epochs):
        tot = 0.0
        for i, (a, b, t) in enumerate(loader):
            loss = bce(model(a, b), t)
            (loss / accumulate).backward()
            tot += loss.item()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"epoch {epoch} bce {tot / len(loader):.4f} lr {scheduler.get_last_lr()[0]:.5f}")


if __name__ == "__main__":
    main()
