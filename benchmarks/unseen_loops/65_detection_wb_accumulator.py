# ruff: noqa
import torch
from torch import nn
import torch.nn.functional as F

import wholebatch as wb


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(1), nn.Linear(75, 40), nn.ReLU())
        self.box = nn.Linear(40, 16)

    def forward(self, x):
        return self.box(self.body(x)).view(-1, 4, 4)


def main():
    torch.manual_seed(56)
    model = Head()
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    acc = wb.Accumulator(model, opt, steps=3, clip_norm=2.0)
    data = [
        (torch.randn(3, 3, 5, 5), torch.rand(3, 4, 4), torch.rand(3, 4) > 0.4) for _ in range(10)
    ]
    for epoch in range(2):
        for img, boxes, valid in acc.over(data):
            err = F.smooth_l1_loss(model(img), boxes, reduction="none").sum(-1)
            step = acc.backward((err * valid).sum(), units=valid.sum())
            if step is not None:
                print(epoch, step.update, float(step.loss))


if __name__ == "__main__":
    main()
