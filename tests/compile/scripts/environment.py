# graph
"""A variable of the environment that nobody has set is set in the middle of the run."""

import os

import torch

import wholebatch as wb

torch.manual_seed(0)
os.environ.pop("LABEL_WEIGHT", None)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def loss(model, x):
    return float(os.environ.get("LABEL_WEIGHT", "1")) * (model(x) - x).square().sum(-1)


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = []
for window in range(8):
    if window == 5:
        os.environ["LABEL_WEIGHT"] = "3"
    losses.append(train.step(torch.randn(8, 8)).loss)
os.environ.pop("LABEL_WEIGHT", None)
