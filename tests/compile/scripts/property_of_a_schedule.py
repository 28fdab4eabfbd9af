# eager: schedule.epoch \(property_of_a_schedule.py:\d+\) changes often
"""A property computes a weight from a counter that grows in every window."""

import os

import torch

import wholebatch as wb

torch.manual_seed(0)


class Schedule:
    def __init__(self):
        self.epoch = 0

    @property
    def beta(self):
        return 0.1 * self.epoch


schedule = Schedule()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def loss(model, x):
    return (model(x) - x).square().sum(-1) + schedule.beta * model(x).abs().sum(-1)


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = []
for _ in range(8):
    losses.append(train.step(torch.randn(8, 8)).loss)
    schedule.epoch += 1
