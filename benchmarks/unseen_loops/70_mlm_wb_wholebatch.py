# ruff: noqa
import torch
from torch import nn

import wholebatch as wb


class MLM(nn.Module):
    def __init__(self, v=32, d=16):
        super().__init__()
        self.e, self.c, self.o = nn.Embedding(v, d), nn.Conv1d(d, d, 3, padding=1), nn.Linear(d, v)

    def forward(self, x):
        return self.o(self.c(self.e(x).transpose(1, 2)).relu().transpose(1, 2))


def loss(model, micro):
    return wb.cross_entropy(model(micro["x"]).flatten(0, 1), micro["y"].flatten())


def main():
    torch.manual_seed(57)
    model = MLM()
    train = wb.WholeBatch(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss=loss, micro_batch=4
    )
    ids = torch.randint(1, 32, (48, 12))
    for epoch in range(2):
        for rows in torch.randperm(48).split(16):
            x = ids[rows]
            mask = torch.rand(x.shape) < torch.rand(len(x), 1) * 0.6
            y = torch.where(mask, x, torch.tensor(-100))
            step = train.step({"x": x.masked_fill(mask, 0), "y": y})
        print(epoch, float(step.loss), step.units)


if __name__ == "__main__":
    main()
