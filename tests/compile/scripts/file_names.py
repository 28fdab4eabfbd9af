# graph
"""Names of files and a fresh dictionary of notes are in every batch, and the loss reads neither."""

import os

import torch

import wholebatch as wb

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def loss(model, micro):
    return wb.cross_entropy(model(micro["x"]), micro["y"])


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = []
for window in range(8):
    names = [f"image_{window}_{row}.jpg" for row in range(8)]
    batch = {"x": torch.randn(8, 8), "y": torch.randint(0, 4, (8,)), "path": names}
    losses.append(train.step(batch).loss)
