# graph
"""The loss takes its labels out of the micro-batch, as trainers do."""

import os

import torch
from torch.nn import functional as F

import wholebatch as wb

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
accumulator = wb.Accumulator(
    model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2, execute=os.environ["EXECUTE"]
)


def loss(batch):
    labels = batch.pop("labels")
    return wb.Loss(F.cross_entropy(model(**batch), labels, reduction="sum"), len(labels))


losses = []
batches = [{"input": torch.randn(4, 8), "labels": torch.randint(0, 4, (4,))} for _ in range(12)]
for batch in accumulator.over(batches):
    accumulator.run(loss, batch)
    losses.append(float(accumulator.last_loss.total))
