# graph
"""One short batch takes a way that no graph can take, and the others keep their graph."""

import os

import torch

import wholebatch as wb

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def loss(model, x):
    error = (model(x) - x).square().sum(-1)
    if len(error) < 4 and error.max().item() > 1e6:
        error = error * 0
    return error


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = [train.step(torch.randn(10 if window == 3 else 8, 8)).loss for window in range(8)]
