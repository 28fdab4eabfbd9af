"""A small batch without accumulation beside a large one, over the same tokens."""

from __future__ import annotations

import math
import pydoc_data.topics
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH, WIDTH, VOCABULARY = 32, 32, 128
SEQUENCES = 2048
"""Training sequences of one run: 65,536 bytes of Python's own manual."""
BATCHES = (1, 4, 16, 64)
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
MARKS = 16
"""Points of a run at which the held-out loss is computed."""
BETA2 = 0.95
"""Adam's second beta for the largest batch; a smaller one forgets as fast per token."""


class ByteLM(nn.Module):
    """A Transformer of one layer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
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
    return mixed[:SEQUENCES], mixed[-256:]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def trained(batch: int, rate: float, seed: int) -> dict[str, Any]:
    """Return the held-out loss over the tokens, and the processor's seconds per token."""
    torch.manual_seed(seed)
    train, held_out = sequences()
    model = ByteLM()
    betas = 0.9, BETA2 ** (batch / max(BATCHES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=0.0)
    updates = len(train) // batch
    marks = {updates * mark // MARKS for mark in range(1, MARKS + 1)}
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    curve, seconds = [], 0.0
    for update, rows in enumerate(order.split(batch), 1):
        begin = time.thread_time()
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - 0.9 * update / updates)
        optimizer.zero_grad()
        loss_of(model, train[rows]).backward()
        optimizer.step()
        seconds += time.thread_time() - begin
        if update in marks:
            with torch.no_grad():
                curve.append((update * batch * LENGTH, loss_of(model, held_out).item()))
    return {"curve": curve, "loss": curve[-1][1], "seconds": seconds / (SEQUENCES * LENGTH)}


def tokens_to(curve: list[tuple[int, float]], loss: float) -> float:
    """Return the tokens after which the curve first is at this loss, between its points."""
    before, above = 0, math.inf
    for tokens, below in curve:
        if below <= loss:
            share = (above - loss) / (above - below) if above < math.inf else 1.0
            return before + share * (tokens - before)
        before, above = tokens, below
    return math.inf


def study(seeds: range, choosing_seed: int) -> list[dict[str, Any]]:
    """Return a row per batch, the largest first, with the best rate of another seed."""
    rows: list[dict[str, Any]] = []
    for batch in sorted(BATCHES, reverse=True):
        tried = {rate: trained(batch, rate, choosing_seed)["loss"] for rate in RATES}
        best = min(tried, key=lambda rate: float(tried[rate]))
        runs = [trained(batch, best, seed) for seed in seeds]
        goal = rows[0]["losses"] if rows else [run["loss"] for run in runs]
        every = SEQUENCES * LENGTH
        rows.append(
            {
                "batch": batch,
                "rate": best,
                "rates": tried,
                "losses": [run["loss"] for run in runs],
                "curves": [run["curve"] for run in runs],
                "tokens": [
                    tokens_to(run["curve"], loss) / every
                    for run, loss in zip(runs, goal, strict=True)
                ],
                "seconds_per_token": statistics.fmean(run["seconds"] for run in runs),
            }
        )
        print(f"batch {batch}: rate {best}, losses {rows[-1]['losses']}", flush=True)
    return rows
