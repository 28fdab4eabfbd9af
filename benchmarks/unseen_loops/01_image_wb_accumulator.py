# ruff: noqa
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wholebatch as wb


def main():
    torch.manual_seed(51)
    ds = TensorDataset(torch.randn(46, 3, 8, 8), torch.randint(0, 5, (46,)))
    loader = DataLoader(ds, batch_size=4, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = wb.Accumulator(model, optimizer, steps=4, clip_norm=1.0)
    for epoch in range(2):
        total = 0.0
        for x, y in acc.over(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            acc.backward(mean=loss, units=len(y))
            total += loss.item() * len(y)
        print(f"epoch {epoch}: {total / len(ds):.4f}")


if __name__ == "__main__":
    main()
