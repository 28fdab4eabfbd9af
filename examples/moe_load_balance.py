"""A mixture of experts whose load-balance loss needs the whole batch.

    python examples/moe_load_balance.py

The balance term is `experts x sum of (share of tokens x mean probability)` over the experts: a
product of two means over all tokens. The sum of it over micro-batches is another number with
another gradient. Here `encode` returns what each micro-batch knows (a loss per sample, and sums by
expert), and `loss` makes the whole from all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb

Batch = dict[str, Tensor]
EXPERTS, WEIGHT = 4, 0.1


class Mixture(nn.Module):
    """Every sample goes to the expert that its router likes best."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(8, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        best, chosen = chances.max(-1)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        return every[torch.arange(len(x)), chosen] * best[:, None], chances, chosen


def encode(model: Mixture, micro: Batch) -> dict[str, Tensor]:
    logits, chances, chosen = model(micro["x"])
    return {
        "losses": F.cross_entropy(logits, micro["y"], reduction="none"),
        "chances": chances,
        "chosen": chosen,
    }


def loss(all: dict[str, Tensor]) -> wb.Loss:
    samples = len(all["losses"])
    shares = F.one_hot(all["chosen"], EXPERTS).double().mean(0)
    balance = EXPERTS * (shares * all["chances"].mean(0)).sum()
    return wb.Loss(all["losses"].sum() + WEIGHT * balance * samples, samples)


def samples(number: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 8, generator=draw, dtype=torch.float64) + 0.5
    return {"x": x, "y": torch.randint(0, 3, (number,), generator=draw)}


def gradient(how: str, micro_batch: int = 8) -> list[Tensor]:
    """What the optimizer sees: undivided, by wb.Coupled, or by plain accumulation."""
    model = Mixture().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    batch = samples(50, 1)
    if how == "wb.Coupled":
        train = wb.WholeBatch(
            model, optimizer, loss=wb.Coupled(encode, loss), micro_batch=micro_batch
        )
        train.step(batch)
    else:
        parts = [batch] if how == "undivided" else wb.split(batch, micro_batch)
        for part in parts:
            (loss(encode(model, part)).total / 50).backward()
        optimizer.step()
    return [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]


def main() -> dict[str, float]:
    reference = gradient("undivided")
    errors: dict[str, float] = {}
    for how in ("wb.Coupled", "plain accumulation"):
        made = gradient(how)
        above = sum(float((a - b).square().sum()) for a, b in zip(made, reference, strict=True))
        errors[how] = (above / sum(float(b.square().sum()) for b in reference)) ** 0.5
        print(f"{how:20} gradient off by {errors[how]:.1e}")
    print(
        f"Shown: the gradient is off by {errors['plain accumulation']:.1%} in the usual loop, by "
        f"{errors['wb.Coupled']:.0e} with wb.Coupled."
    )
    return errors


if __name__ == "__main__":
    main()
