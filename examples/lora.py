"""LoRA: a frozen language model with small trained matrices, on answers of different lengths.

    python examples/lora.py

Only the labels of the answer count, and answers differ in length: the usual mean of means is
wrong, whatever part of the model is trained. `wb.WholeBatch` takes the model as it is: it adds up
gradients for the trained matrices alone, and leaves the frozen weights as they are.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import wholebatch as wb

Batch = dict[str, Tensor]
WORDS, MICRO = 64, 4


class LoRA(nn.Module):
    """A frozen linear layer plus a product of two small matrices."""

    def __init__(self, base: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * (x @ self.down.T @ self.up.T)
        return out


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*split.chunk(3, 1), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.feed(x)


def adapted() -> nn.Module:
    """Return a language model whose attention has LoRA layers and all else is frozen."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(2)]
    model = nn.Sequential(nn.Embedding(WORDS, 64), *blocks, nn.Linear(64, WORDS))
    model.requires_grad_(False)
    for block in blocks:
        block.qkv, block.out = LoRA(block.qkv), LoRA(block.out)
    return model.double()


def answers(number: int = 32) -> Batch:
    """Questions of 4 tokens, which do not count, with answers of 1 to 20."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (number, 24), generator=draw)
    lengths = torch.randint(1, 21, (number, 1), generator=draw)
    place = torch.arange(24)
    counts = (place >= 4) & (place < 4 + lengths)
    return {"input_ids": tokens, "labels": tokens.masked_fill(~counts, -100)}


def mean_loss(model: nn.Module, micro: Batch) -> Tensor:
    logits = model(micro["input_ids"])[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, micro["labels"][:, 1:].flatten())


def loss(model: nn.Module, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(model(micro["input_ids"])[:, :-1], micro["labels"][:, 1:])


def undivided(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    mean_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def before(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    micros = wb.split(batch, MICRO)
    for micro in micros:
        (mean_loss(model, micro) / len(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def after(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    wb.WholeBatch(model, optimizer, loss=loss, micro_batch=MICRO).step(batch)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def main() -> dict[str, float]:
    start, batch = adapted(), answers()
    moved = {}
    for name, step in (("undivided", undivided), ("before", before), ("after", after)):
        model = copy.deepcopy(start)
        step(model, torch.optim.SGD(trained(model), lr=0.1), batch)
        moved[name] = parameters_to_vector(trained(model)).detach()
    length = (moved["undivided"] - parameters_to_vector(trained(start)).detach()).norm()
    errors = {
        n: float((moved[n] - moved["undivided"]).norm() / length) for n in ("before", "after")
    }
    errors["frozen weights moved"] = max(
        float((new - old).abs().max())
        for new, old in zip(model.parameters(), start.parameters(), strict=True)
        if not old.requires_grad
    )
    share = sum(p.numel() for p in trained(start)) / sum(p.numel() for p in start.parameters())
    print(
        f"Shown: {share:.0%} of the weights are trained; their update is off by "
        f"{errors['before']:.0%} in the usual loop, by {errors['after']:.0e} with wb.WholeBatch."
    )
    return errors


if __name__ == "__main__":
    main()
