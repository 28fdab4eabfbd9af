# graph
"""A weight on a class is another one after a warm-up."""

import os

import torch

import wholebatch as wb

torch.manual_seed(0)


class Config:
    beta = 1.0


model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def loss(model, x):
    return (model(x) - x).square().sum(-1) + Config.beta * model(x).abs().sum(-1)


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = []
for epoch in range(8):
    if epoch == 5:
        Config.beta = 20.0
    losses.append(train.step(torch.randn(8, 8)).loss)
