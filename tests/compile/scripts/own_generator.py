# eager: line \d+: .*rng.uniform
"""The loss draws from a generator of its own."""

import os

import numpy as np
import torch

import wholebatch as wb

torch.manual_seed(0)
rng = np.random.default_rng(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def loss(model, x):
    return (model(x * rng.uniform(0.5, 1.5)) - x).square().sum(-1)


train = wb.WholeBatch(
    model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"], audit=False
)
losses = [train.step(torch.randn(8, 8)).loss for _ in range(6)]
