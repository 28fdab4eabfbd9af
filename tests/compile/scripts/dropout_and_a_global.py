# graph
"""With dropout nobody can compare a graph with eager code, and a weight changes."""

import os

import torch
from torch import nn

import wholebatch as wb

torch.manual_seed(0)
BETA = 1.0
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def penalty(y):
    return BETA * y.abs().sum(-1)


def loss(model, x):
    y = model(x)
    return (y - x).square().sum(-1) + penalty(y)


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = []
for window in range(8):
    if window == 5:
        BETA = 20.0
    losses.append(train.step(torch.randn(8, 8)).loss)
