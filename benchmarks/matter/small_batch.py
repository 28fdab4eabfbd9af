"""A small batch without accumulation beside a large one, over the same tokens."""

from __future__ import annotations

import pydoc_data.topics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH, WIDTH, VOCABULARY = 48, 64, 128
SEQUENCES = 5120
"""Training sequences of one run: about 250,000 bytes of Python's own manual."""
BATCHES = (4, 16, 64)
RATES = (1e-3, 3e-3, 1e-2)
BETA2 = 0.95
"""Adam's second beta for the largest batch; a smaller one forgets as fast per token."""


class ByteLM(nn.Module):
    """A Transformer of two layers over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.read = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embed(tokens) + self.place, mask=self.mask, is_causal=True)
        logits: Tensor = self.read(hidden)
        return logits


def sequences() -> tuple[Tensor, Tensor]:
    """Training and held-out sequences of LENGTH + 1 bytes."""
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    data = torch.tensor(list(text.encode("ascii", "replace"))).clamp(max=VOCABULARY - 1)
    data = data[: len(data) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    mixed = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))]
    return mixed[:SEQUENCES], mixed[-512:]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def trained(batch: int, rate: float, seed: int) -> dict[str, Any]:
    """Return the held-out loss at a quarter, half and all of the tokens, and seconds by part."""
    torch.manual_seed(seed)
    train, held_out = sequences()
    model = ByteLM()
    betas = 0.9, BETA2 ** (batch / max(BATCHES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=0.0)
    updates = len(train) // batch
    marks = {updates // 4, updates // 2, updates}
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    curve, step_seconds, seconds = [], 0.0, 0.0
    for update, rows in enumerate(order.split(batch), 1):
        begin = time.thread_time()
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - 0.9 * update / updates)
        optimizer.zero_grad()
        loss_of(model, train[rows]).backward()
        middle = time.thread_time()
        optimizer.step()
        end = time.thread_time()
        step_seconds, seconds = step_seconds + end - middle, seconds + end - begin
        if update in marks:
            with torch.no_grad():
                curve.append((update * batch * LENGTH, loss_of(model, held_out).item()))
    return {"curve": curve, "loss": curve[-1][1], "optimizer_share": step_seconds / seconds}


def study(seeds: range) -> list[dict[str, Any]]:
    """Return a row per batch: the best rate of the first seed, then all seeds with it."""
    rows = []
    for batch in BATCHES:
        tried = {rate: trained(batch, rate, seeds[0]) for rate in RATES}
        best = min(tried, key=lambda rate: float(tried[rate]["loss"]))
        runs = [tried[best]] + [trained(batch, best, seed) for seed in seeds[1:]]
        rows.append(
            {
                "batch": batch,
                "rate": best,
                "rates": {rate: run["loss"] for rate, run in tried.items()},
                "losses": [run["loss"] for run in runs],
                "curves": [run["curve"] for run in runs],
                "optimizer_share": sum(run["optimizer_share"] for run in runs) / len(runs),
            }
        )
        print(f"batch {batch}: rate {best}, losses {rows[-1]['losses']}", flush=True)
    return rows
