"""DPO on micro-batches with different numbers of pairs.

    python examples/dpo.py

Answers differ in length, so micro-batches are filled up to a number of tokens: some hold many
short pairs, some a few long ones. The usual loop takes the mean over the pairs of each micro-batch
and divides by the number of micro-batches, so a pair beside long ones counts more.
`wb.losses.dpo_loss` is a sum over pairs with their number, and the window divides once.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import wholebatch as wb

Batch = dict[str, Tensor]
WORDS, BETA, LONGEST = 40, 0.5, 20


class Policy(nn.Module):
    """A small recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 24)
        self.state = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.state(self.words(tokens))[0])
        return logits


def preferences(pairs: int = 48) -> Batch:
    """Chosen and rejected answers, sorted by length; label -100 does not count."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, LONGEST, (pairs,), generator=draw).sort().values
    batch: Batch = {"lengths": lengths}
    for kind in ("chosen", "rejected"):
        tokens = torch.randint(0, WORDS, (pairs, LONGEST), generator=draw)
        labels = tokens.masked_fill(torch.arange(LONGEST) >= lengths[:, None], -100)
        batch |= {kind: tokens, f"{kind}_labels": labels}
    return batch


def logprobs(model: nn.Module, micro: Batch) -> list[Tensor]:
    """Return the log probabilities of the chosen and of the rejected answers."""
    kinds = ("chosen", "rejected")
    return [
        wb.losses.sequence_logprobs(model(micro[kind]), micro[f"{kind}_labels"]) for kind in kinds
    ]


def by_tokens(batch: Batch, tokens: int = 128) -> list[Batch]:
    """Cut a batch into micro-batches of at most so many tokens."""
    micros, first = [], 0
    for place in range(1, len(batch["lengths"]) + 1):
        if place == len(batch["lengths"]) or batch["lengths"][first : place + 1].sum() > tokens:
            micros.append({name: leaf[first:place] for name, leaf in batch.items()})
            first = place
    return micros


def before(model: nn.Module, optimizer: torch.optim.Optimizer, micros: list[Batch]) -> None:
    for micro in micros:
        chosen, rejected = logprobs(model, micro)
        gain = (chosen - micro["ref_chosen"]) - (rejected - micro["ref_rejected"])
        (-F.logsigmoid(BETA * gain).mean() / len(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def after(model: nn.Module, optimizer: torch.optim.Optimizer, micros: list[Batch]) -> None:
    acc = wb.Accumulator(model, optimizer, steps=len(micros))
    for micro in acc.over(micros):
        acc.backward(
            wb.losses.dpo_loss(
                *logprobs(model, micro), micro["ref_chosen"], micro["ref_rejected"], beta=BETA
            )
        )


def main() -> dict[str, float]:
    batch, start = preferences(), Policy().double()
    with torch.no_grad():
        batch["ref_chosen"], batch["ref_rejected"] = logprobs(start, batch)
    micros = by_tokens(batch)
    moved = {}
    for name, loop, data in (
        ("undivided", before, [batch]),
        ("before", before, micros),
        ("after", after, micros),
    ):
        model = copy.deepcopy(start)
        loop(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        moved[name] = parameters_to_vector(model.parameters()).detach()
    length = (moved["undivided"] - parameters_to_vector(start.parameters()).detach()).norm()
    errors = {
        n: float((moved[n] - moved["undivided"]).norm() / length) for n in ("before", "after")
    }
    print("pairs per micro-batch:", *(len(micro["lengths"]) for micro in micros))
    print(
        f"Shown: the update is off by {errors['before']:.0%} in the usual loop, by "
        f"{errors['after']:.0e} with wb.losses.dpo_loss."
    )
    return errors


if __name__ == "__main__":
    main()
