"""Does a batch that grows with the decay reach the loss of a fixed one? A small network on bytes.

    PYTHONPATH=src python benchmarks/decay_for_batch.py [--seeds 2] [--rate 0.04]

A network of 35,000 parameters predicts the next byte of Python sources from the four before it. The
fixed batch has 32 sequences of 64 bytes, and a cosine lowers its rate to a tenth. The other begins
with 32 too, and doubles where the cosine has halved its rate, three times. Its rate follows with a
power of the batch: 0.5 is the square root (Seesaw), 1 leaves the rate as it was. One thread, half a
minute a run.
"""

from __future__ import annotations

import argparse
import math
import statistics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.cli.recipes import bytes_gpt

CONTEXT, SEQUENCES, HELD_OUT, WARM_UP = 64, 32768, 512, 320
FIXED, MOST = 32, 256


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte, self.inner, self.head = (
            nn.Embedding(256, 16),
            nn.Linear(64, 96),
            nn.Linear(96, 256),
        )
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        padded = F.pad(self.byte(tokens), (0, 0, 3, 0))
        four = torch.cat([padded[:, i : i + tokens.shape[1]] for i in range(4)], -1)
        logits: Tensor = self.head(F.gelu(self.inner(four)))
        return logits


def run(text: Tensor, order: Tensor, *, rate: float, power: float, seed: int) -> tuple[int, float]:
    """Return the updates of one run, and its loss on held-out sequences; power 0: a fixed batch."""

    def pieces(chosen: Tensor) -> tuple[Tensor, Tensor]:
        found = text[chosen[:, None] * CONTEXT + torch.arange(CONTEXT + 1)].long()
        return found[:, :-1], found[:, 1:]

    def loss(chosen: Tensor) -> Tensor:
        tokens, following = pieces(chosen)
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    torch.manual_seed(seed)
    model = Network()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    done = updates = 0
    while done < SEQUENCES:
        through = min(1.0, max(0.0, (done - WARM_UP) / (SEQUENCES - WARM_UP)))
        decay = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * through))
        size = min(MOST, FIXED << int(math.log2(1 / decay) + 1e-9)) if power else FIXED
        for group in optimizer.param_groups:
            factor = min(1, (done + 1) / WARM_UP) * decay * (size / FIXED) ** power
            group["lr"] = rate * factor
        optimizer.zero_grad()
        loss(order[HELD_OUT:][torch.arange(done, done + size)]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done, updates = done + size, updates + 1
    with torch.no_grad():
        return updates, float(loss(order[:HELD_OUT]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.04)
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = bytes_gpt.data()._text
    count = (len(text) - 1) // CONTEXT
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    print("| rate | batch | power | updates | held-out loss by seed | mean |")
    print("|---:|---|---:|---:|---|---:|")
    for power in (0.0, 0.5, 1.0):
        runs = [
            run(text, order, rate=given.rate, power=power, seed=seed) for seed in range(given.seeds)
        ]
        losses = [loss for _, loss in runs]
        batch = f"{FIXED} to {MOST} | {power}" if power else f"{FIXED} | "
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        mean = f"{statistics.fmean(losses):.4f}"
        print(f"| {given.rate} | {batch} | {runs[0][0]} | {shown} | {mean} |", flush=True)


if __name__ == "__main__":
    main()
