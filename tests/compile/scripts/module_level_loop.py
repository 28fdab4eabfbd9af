# graph
"""The loop's variables have the names of the keys that the loss reads."""

import os

import torch
from torch.utils.data import DataLoader, TensorDataset

import wholebatch as wb

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,))), batch_size=8)


def loss(model, micro):
    return wb.cross_entropy(model(micro["x"]), micro["y"])


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = []
for x, y in loader:
    step = train.step({"x": x, "y": y})
    losses.append(step.loss)
    loss_so_far = sum(losses)
