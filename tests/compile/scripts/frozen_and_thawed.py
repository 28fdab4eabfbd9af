# graph
"""A layer is frozen for three windows, and evaluated in between."""

import os

import torch
from torch import nn

import wholebatch as wb

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def loss(model, micro):
    return wb.cross_entropy(model(micro["x"]), micro["y"])


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = []
for window in range(10):
    model[0].requires_grad_(window >= 3)
    losses.append(train.step({"x": torch.randn(8, 8), "y": torch.randint(0, 4, (8,))}).loss)
    model.eval()
    with torch.no_grad():
        losses.append(float(model(torch.ones(1, 8)).sum()))
    model.train()
