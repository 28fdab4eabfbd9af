# eager: progress_bar.py, line 21
"""The loss describes a progress bar and writes to the log."""

import io
import logging
import os

import torch
from tqdm import tqdm

import wholebatch as wb

torch.manual_seed(0)
logger = logging.getLogger("training")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
bar = tqdm(range(8), file=io.StringIO())


def loss(model, x):
    bar.set_description(f"batch of {len(x)}")
    logger.info("a batch of %d", len(x))
    return (model(x) - x).square().sum(-1)


train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, execute=os.environ["EXECUTE"])
losses = [train.step(torch.randn(8, 8)).loss for _ in bar]
