# ruff: noqa
import torch
from torch import nn


class MPNN(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.inp = nn.Linear(5, d)
        self.msg = nn.Linear(d, d)
        self.out = nn.Linear(d, 1)

    def forward(self, x, adj):
        h = self.inp(x).relu()
        for _ in range(2):
            h = h + self.msg(adj @ h).relu()
        return self.out(h.sum(1)).squeeze(-1)


def train(epochs=2, accumulation_steps=4, batch_size=5):
    torch.manual_seed(19)
    n = 50  # 10 batches of 5: two full windows and one of two
    x, adj, y = torch.randn(n, 6, 5), (torch.rand(n, 6, 6) > 0.6).float(), torch.randn(n)
    model = MPNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    n_batches = n // batch_size
    for epoch in range(epochs):
        perm = torch.randperm(n)
        epoch_loss = 0.0
        for b in range(n_batches):
            idx = perm[b * batch_size : (b + 1) * batch_size]
            loss = (model(x[idx], adj[idx]) - y[idx]).abs().mean()
            epoch_loss += loss.item()
            loss = loss / accumulation_steps
            loss.backward()
            if (b + 1) % accumulation_steps == 0 or (b + 1) == n_batches:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch + 1} mae {epoch_loss / n_batches:.4f}")


if __name__ == "__main__":
    train()
