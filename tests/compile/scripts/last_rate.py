# eager: line \d+: .*get_last_lr
"""The loss asks the scheduler for its rate."""

import os

import torch

import wholebatch as wb

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def loss(model, x):
    return (model(x) - x).square().sum(-1) * (1 + 10 * scheduler.get_last_lr()[0])


train = wb.WholeBatch(
    model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"], scheduler=scheduler
)
losses = [train.step(torch.randn(8, 8)).loss for _ in range(6)]
