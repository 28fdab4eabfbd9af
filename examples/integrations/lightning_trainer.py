"""A language model in Lightning's Trainer: windows of 4 micro-batches, padded sequences.

python examples/integrations/lightning_trainer.py

This is the script before. These lines make every update that of the whole batch
(docs/integrations/lightning.md):

    + from wholebatch.integrations.lightning import ExactAccumulation
    + callbacks=[ExactAccumulation(units=lambda batch: (batch["y"] != -100).sum())],
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--save", help="write the trained weights here")
options = parser.parse_args()


def samples(number=72, length=12, words=64):
    """Sequences of different lengths; what is padding has the label -100."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, words, (number, length + 1), generator=draw)
    lengths = torch.randint(1, length + 1, (number, 1), generator=draw)
    labels = tokens[:, 1:].masked_fill(torch.arange(length) >= lengths, -100)
    return [{"x": x, "y": y} for x, y in zip(tokens[:, :-1], labels, strict=True)]


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64)
        self.layers = nn.Sequential(*layers).double()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layers(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def train_dataloader(self):
        data, ranks = samples(), self.trainer.world_size
        sampler = DistributedSampler(data, ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=options.micro_batch, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


model = Model()
trainer = Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=options.devices,
    strategy="ddp" if options.devices > 1 else "auto",
    accumulate_grad_batches=options.steps,
    gradient_clip_val=0.5,
    use_distributed_sampler=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
    logger=False,
)
trainer.fit(model)

if options.save and trainer.is_global_zero:
    torch.save(model.state_dict(), options.save)
