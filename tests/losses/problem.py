"""A small policy with completions of very different lengths, and its losses by plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb

WORDS = 11
LENGTHS = (7, 1, 4, 2, 7, 3, 0, 5, 6, 1, 2, 4)
GROUPS = (0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 0, 2)  # the last two are far from their groups
UNEVEN = ((12,), (1, 2, 3, 6), (5, 1, 4, 2), (1,) * 12)
Batch = dict[str, Tensor]
MEANS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "sequences": {},
    "sequence_sums": {},
    "constant": {"constant": 7.0},
    "groups": {"group_size": "group_tokens"},
    "group_sequences": {"group_size": "group_sequences"},
}


class Policy(nn.Module):
    """Logits of the next word, and a value, from the words so far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(WORDS, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.read = nn.Linear(8, WORDS)
        self.value = nn.Linear(8, 1)
        self.double()

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.mix(self.embed(words))[0]
        return self.read(hidden), self.value(hidden)[..., 0]


def logprobs(model: nn.Module, micro: Batch) -> Tensor:
    logits, _ = model(micro["words"])
    logs: Tensor = logits[:, :-1].log_softmax(-1)
    return logs.gather(-1, micro["words"][:, 1:, None])[..., 0]


def batch() -> Batch:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    number, longest = len(LENGTHS), max(LENGTHS)
    mask = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]
    data = {
        "words": torch.randint(0, WORDS, (number, longest + 1), generator=generator),
        "mask": mask,
        "advantages": normal(number),
        "returns": normal(number, longest),
    }
    with torch.no_grad():
        now = logprobs(Policy(), data)
    data["old"] = now + 0.3 * normal(number, longest)
    data["reference"] = now + 0.2 * normal(number, longest)
    data["group"] = groups = torch.tensor(GROUPS)
    data["group_tokens"] = wb.losses.group_sizes(groups, mask)
    data["group_sequences"] = wb.losses.group_sizes(groups)
    return data


def options_of(mean: str, micro: Batch) -> dict[str, Any]:
    """The options of a mean, with its columns of the micro-batch."""
    columns = MEANS[mean].items()
    return {name: micro[value] if isinstance(value, str) else value for name, value in columns}


def ours(mean: str, **more: Any) -> Callable[[nn.Module, Batch], wb.Loss]:
    """`wb.losses.policy_loss` with this mean, of the small policy."""

    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        logs = logprobs(model, micro)
        arguments = {"old": micro["old"], "mean": mean, **more, **options_of(mean, micro)}
        return wb.losses.policy_loss(logs, micro["advantages"], micro["mask"], **arguments)

    return loss


def clipped(logprob: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """The clipped loss of one token."""
    ratio = (logprob - old).exp()
    kept = ratio.clamp(1 - low, 1 + high)
    return -torch.min(ratio * advantage, kept * advantage)


def token_losses(model: nn.Module, data: Batch) -> list[list[Tensor]]:
    """The clipped loss of every token that counts, by sequence."""
    logs = logprobs(model, data)
    return [
        [
            clipped(logs[i, t], data["old"][i, t], data["advantages"][i], 0.2, 0.2)
            for t in range(int(data["mask"][i].sum()))
        ]
        for i in range(len(logs))
    ]


def by_hand(mean: str, losses: list[list[Tensor]], groups: list[int]) -> Tensor:
    """The mean of these losses as its definition reads, without a mask or a unit."""
    zero = torch.zeros((), dtype=torch.float64)
    sums = [sum(tokens, zero) for tokens in losses]
    means = [total / max(1, len(tokens)) for total, tokens in zip(sums, losses, strict=True)]
    number = len(losses)
    if mean == "tokens":
        return sum(sums, zero) / max(1, sum(map(len, losses)))
    if mean == "sequences":
        return sum(means, zero) / number
    if mean == "sequence_sums":
        return sum(sums, zero) / number
    if mean == "constant":
        return sum(sums, zero) / (number * 7.0)
    of_groups = []
    for group in sorted(set(groups)):
        members = [i for i in range(number) if groups[i] == group]
        if mean == "groups":
            tokens = sum(len(losses[i]) for i in members)
            of_groups.append(sum((sums[i] for i in members), zero) / max(1, tokens))
        else:
            of_groups.append(sum((means[i] for i in members), zero) / len(members))
    return sum(of_groups, zero) / len(of_groups)


def undivided(mean: str) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of what it is given, by hand; of a micro-batch: what a plain loop would take."""

    def loss(model: nn.Module, data: Batch) -> Tensor:
        return by_hand(mean, token_losses(model, data), data["group"].tolist())

    return loss
