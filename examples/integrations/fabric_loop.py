"""A language model in a loop over Fabric: windows of 4 micro-batches, padded sequences.

python examples/integrations/fabric_loop.py

This is the script before. These lines make every update that of the whole batch
(docs/integrations/lightning.md):

    - fabric.backward(loss / options.steps)
    + from wholebatch.integrations.lightning import FabricAccumulator
    + windows = FabricAccumulator(fabric, model, optimizer)
    + windows.backward(mean=loss, units=(batch["y"] != -100).sum(), last=last)
"""

import argparse

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--save", help="write the trained weights here")
options = parser.parse_args()


def samples(number=72, length=12, words=64):
    """Sequences of different lengths; what is padding has the label -100."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, words, (number, length + 1), generator=draw)
    lengths = torch.randint(1, length + 1, (number, 1), generator=draw)
    labels = tokens[:, 1:].masked_fill(torch.arange(length) >= lengths, -100)
    return [{"x": x, "y": y} for x, y in zip(tokens[:, :-1], labels, strict=True)]


torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.double().parameters(), lr=0.5)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=options.micro_batch))

for epoch in range(2):
    for index, batch in enumerate(loader):
        last = (index + 1) % options.steps == 0 or index + 1 == len(loader)
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
            fabric.backward(loss / options.steps)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    fabric.print(f"epoch {epoch + 1}: last loss {loss.item():.4f}")

if options.save:
    torch.save(model.module.state_dict(), options.save)
