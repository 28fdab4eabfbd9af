"""A language model in Accelerate's loop: windows of 4 micro-batches, padded sequences.

accelerate launch examples/integrations/accelerate_loop.py

This is the script before. These lines make every update that of the whole batch
(docs/integrations/accelerate.md):

    - accelerator.backward(loss)
    + from wholebatch.integrations.accelerate import AccelerateAccumulator
    + windows = AccelerateAccumulator(accelerator, model, optimizer)
    + windows.backward(mean=loss, units=(batch["y"] != -100).sum())
"""

import argparse

import torch
from accelerate import Accelerator
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
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.steps)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.double().parameters(), lr=0.5)
loader = DataLoader(samples(), batch_size=options.micro_batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}: last loss {loss.item():.4f}")

if options.save and accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), options.save)
