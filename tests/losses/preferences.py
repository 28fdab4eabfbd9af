"""Pairs of preference data, with their losses by wholebatch and by plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.losses.problem import WORDS, Batch, Policy

NUMBER, LONGEST = 9, 6


def pairs() -> Batch:
    """Nine prompts with a chosen and a rejected answer of 1 to 5 words."""
    generator = torch.Generator().manual_seed(11)
    data: Batch = {}
    for which in ("chosen", "rejected"):
        words = torch.randint(0, WORDS, (NUMBER, LONGEST), generator=generator)
        lengths = torch.randint(1, LONGEST, (NUMBER,), generator=generator)
        data[which] = words
        data[f"{which}_labels"] = words.masked_fill(
            torch.arange(LONGEST)[None] > lengths[:, None], -100
        )
        draw = torch.randn(NUMBER, LONGEST, generator=generator, dtype=torch.float64)
        data[f"{which}_reference"] = -2.0 * lengths + 0.5 * draw[:, 0]
    return data


def _logs(model: nn.Module, micro: Batch, which: str) -> Tensor:
    logits, _ = model(micro[which])
    return wb.losses.sequence_logprobs(logits, micro[f"{which}_labels"])


def _pair_loss(**options: Any) -> Any:
    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        which = ("chosen", "rejected")
        logs = [_logs(model, micro, side) for side in which]
        references = [micro[f"{side}_reference"] for side in which]
        return wb.losses.dpo_loss(*logs, *references, **options)

    return loss


OURS: dict[str, Any] = {
    "dpo": _pair_loss(beta=0.2),
    "cdpo": _pair_loss(label_smoothing=0.1),
}


# ------------------------------------------------------------------- by plain torch


def _words(data: Batch, which: str, i: int) -> list[int]:
    """The places of the labels that count."""
    return [t for t in range(1, LONGEST) if data[f"{which}_labels"][i, t] != -100]


def _log(model: Policy, data: Batch, which: str, i: int) -> Tensor:
    logits, _ = model(data[which][i : i + 1])
    of_words = [logits[0, t - 1].log_softmax(0)[data[which][i, t]] for t in _words(data, which, i)]
    total = torch.stack(of_words).sum()
    return total


def _delta(model: Policy, data: Batch, i: int) -> Tensor:
    chosen = _log(model, data, "chosen", i) - data["chosen_reference"][i]
    return chosen - (_log(model, data, "rejected", i) - data["rejected_reference"][i])


def _of_pairs(of_pair: Callable[[Policy, Batch, int], Tensor]) -> Callable[[Any, Batch], Tensor]:
    return lambda model, data: torch.stack(
        [of_pair(model, data, i) for i in range(len(data["chosen"]))]
    ).mean()


def _smooth(model: Policy, data: Batch, i: int) -> Tensor:
    right = torch.sigmoid(0.1 * _delta(model, data, i))
    return -0.9 * right.log() - 0.1 * (1 - right).log()


PLAIN: dict[str, Callable[[Any, Batch], Tensor]] = {
    "dpo": _of_pairs(lambda m, d, i: -torch.sigmoid(0.2 * _delta(m, d, i)).log()),
    "cdpo": _of_pairs(_smooth),
}
