# graph
"""Class weights are an array of NumPy that is written in place."""

import os

import numpy as np
import torch
from torch.nn import functional as F

import wholebatch as wb

torch.manual_seed(0)
weights = np.ones(4, dtype=np.float32)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model, micro):
    per_sample = F.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
    return per_sample * torch.as_tensor(weights)[micro["y"]]


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = []
for window in range(8):
    if window == 5:
        weights[:] = [10, 0.1, 0.1, 0.1]
    losses.append(train.step({"x": torch.randn(8, 8), "y": torch.randint(0, 4, (8,))}).loss)
