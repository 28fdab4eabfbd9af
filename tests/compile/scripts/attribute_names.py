# graph
"""A global has the name of an attribute that the loss reads."""

import os
from typing import NamedTuple

import torch

import wholebatch as wb

torch.manual_seed(0)


class Samples(NamedTuple):
    obs: torch.Tensor
    rewards: torch.Tensor


model = torch.nn.Linear(4, 1)
accumulator = wb.Accumulator(
    model, torch.optim.SGD(model.parameters(), lr=0.01), steps=2, execute=os.environ["EXECUTE"]
)


def loss(data):
    error = (model(data.obs).squeeze(1) - data.rewards).square().sum()
    return wb.Loss(error, data.rewards.shape[0])


losses = []
for _ in range(8):
    rewards = torch.randn(1)
    for data in accumulator.over([Samples(torch.randn(5, 4), torch.randn(5)) for _ in range(2)]):
        accumulator.run(loss, data)
        losses.append(float(accumulator.last_loss.total))
