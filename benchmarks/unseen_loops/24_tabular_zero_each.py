# ruff: noqa
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_loader(bs=8):
    rng = np.random.default_rng(10)
    X = rng.normal(size=(128, 9)).astype("float32")
    y = (X[:, 0] * 2 - X[:, 3] + 0.1 * rng.normal(size=128)).astype("float32")
    return DataLoader(
        TensorDataset(torch.from_numpy(X), torch.from_numpy(y)), batch_size=bs, shuffle=True
    )


class Fit:
    def __init__(self, accumulation_steps=4):
        self.model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.crit = nn.MSELoss()
        self.k = accumulation_steps

    def fit(self, loader, epochs=3):
        for ep in range(epochs):
            tot = 0
            for step, (xb, yb) in enumerate(loader):
                self.opt.zero_grad()
                pred = self.model(xb).squeeze(1)
                loss = self.crit(pred, yb) / self.k
                loss.backward()
                tot += loss.item() * self.k
                if (step + 1) % self.k == 0:
                    self.opt.step()
            print(f"epoch {ep}: rmse {np.sqrt(tot / len(loader)):.3f}")


if __name__ == "__main__":
    torch.manual_seed(10)
    Fit().fit(get_loader())
