# graph
"""A teacher is the moving average of the model: it is written after every update."""

import copy
import os

import torch
from torch import nn

import wholebatch as wb

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
teacher = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model, x):
    with torch.no_grad():
        wanted = teacher(x)
    return (model(1.1 * x) - wanted).square().sum(-1)


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = []
for _ in range(8):
    losses.append(train.step(torch.randn(8, 8)).loss)
    with torch.no_grad():
        for own, new in zip(teacher.parameters(), model.parameters(), strict=True):
            own.lerp_(new, 0.2)
