# ruff: noqa
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb


class Model(nn.Module):
    def __init__(self, v=30, d=20):
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v)

    def forward(self, x):
        return self.o(self.r(self.e(x))[0])


def batches(n, gen):
    for _ in range(n):
        ids = torch.randint(0, 30, (3, 11), generator=gen)
        y = ids[:, 1:].clone()
        for row, k in enumerate(torch.randint(2, 11, (3,), generator=gen)):
            y[row, k:] = -100
        yield {"x": ids[:, :-1], "y": y}


def main():
    torch.manual_seed(50)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    acc = wb.Accumulator(model, optimizer, steps=4, clip_norm=1.0)
    for epoch in range(2):
        loader = list(batches(10, torch.Generator().manual_seed(epoch)))
        for batch in acc.over(loader):
            total = F.cross_entropy(
                model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum"
            )
            step = acc.backward(total, units=(batch["y"] != -100).sum())
            if step is not None:
                print(epoch, step.update, float(step.loss), step.units)


if __name__ == "__main__":
    main()
