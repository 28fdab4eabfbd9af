# graph
"""Micro-batches of one window are weighed by turns: a global changes between them."""

import os

import torch

import wholebatch as wb

torch.manual_seed(0)
weight = 1.0
model = torch.nn.Linear(8, 8)
accumulator = wb.Accumulator(
    model,
    torch.optim.SGD(model.parameters(), lr=0.01),
    steps=4,
    execute=os.environ["EXECUTE"],
    audit=False,
)


def loss(x):
    return wb.Loss(weight * (model(x) - x).square().sum(), len(x))


losses = []
for index, x in enumerate(accumulator.over([torch.randn(4, 8) for _ in range(24)])):
    weight = (1.0, 3.0, 3.0, 1.0)[index % 4]
    accumulator.run(loss, x)
    losses.append(float(accumulator.last_loss.total))
