"""Pairs and samples of preference data, with their losses by wholebatch and by plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.losses.problem import WORDS, Batch, Policy

NUMBER, LONGEST = 9, 6


def pairs() -> Batch:
    """Nine prompts with a chosen, a rejected and a mismatched answer of 1 to 5 words."""
    generator = torch.Generator().manual_seed(11)
    data: Batch = {}
    for which in ("chosen", "rejected", "mismatched"):
        words = torch.randint(0, WORDS, (NUMBER, LONGEST), generator=generator)
        lengths = torch.randint(1, LONGEST, (NUMBER,), generator=generator)
        data[which] = words
        data[f"{which}_labels"] = words.masked_fill(
            torch.arange(LONGEST)[None] > lengths[:, None], -100
        )
        draw = torch.randn(NUMBER, LONGEST, generator=generator, dtype=torch.float64)
        data[f"{which}_reference"] = -2.0 * lengths + 0.5 * draw[:, 0]
    data["desirable"] = torch.arange(NUMBER) % 3 != 0
    data["margin"] = torch.linspace(0, 1, NUMBER, dtype=torch.float64)
    teacher = torch.randn(NUMBER, LONGEST, WORDS, generator=generator, dtype=torch.float64)
    data["teacher"] = 2 * teacher
    return data


def _logs(model: nn.Module, micro: Batch, which: str, *, mean: bool = False) -> Tensor:
    logits, _ = model(micro[which])
    return wb.losses.sequence_logprobs(logits, micro[f"{which}_labels"], mean=mean)


def _rewards(model: nn.Module, micro: Batch) -> tuple[Tensor, Tensor]:
    chosen, rejected = (model(micro[which])[1][:, -1] for which in ("chosen", "rejected"))
    return chosen, rejected


def _encoded(model: nn.Module, micro: Batch) -> dict[str, Tensor]:
    with torch.no_grad():
        mismatched = _logs(model, micro, "mismatched")
    return {
        "policy": _logs(model, micro, "chosen"),
        "reference": micro["chosen_reference"],
        "desirable": micro["desirable"],
        "kl": mismatched - micro["mismatched_reference"] + 8,
    }


def _kto(every: dict[str, Tensor]) -> wb.Loss:
    return wb.losses.kto_loss(**every, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)


def _distilled(beta: float) -> Callable[[nn.Module, Batch], wb.Loss]:
    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        mask = micro["chosen_labels"][:, 1:] != -100
        student = model(micro["chosen"])[0][:, :-1]
        return wb.losses.distillation_loss(
            student, micro["teacher"][:, :-1], mask, beta=beta, temperature=1.5
        )

    return loss


def _pair_loss(function: Any, *, mean: bool, reference: bool, **options: Any) -> Any:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = [_logs(model, micro, which, mean=mean) for which in ("chosen", "rejected")]
        if reference:
            given += [micro["chosen_reference"], micro["rejected_reference"]]
        return function(*given, **options)

    return loss


def _orpo_tokens(model: nn.Module, micro: Batch) -> Any:
    tokens = (micro["chosen_labels"][:, 1:] != -100).sum(1)
    given = [_logs(model, micro, which, mean=True) for which in ("chosen", "rejected")]
    return wb.losses.orpo_loss(*given, beta=0.4, tokens=tokens)


OURS: dict[str, Any] = {
    "dpo": _pair_loss(wb.losses.dpo_loss, mean=False, reference=True, beta=0.2),
    "cdpo": _pair_loss(wb.losses.dpo_loss, mean=False, reference=True, label_smoothing=0.1),
    "ipo": _pair_loss(wb.losses.ipo_loss, mean=True, reference=True, beta=0.2),
    "simpo": _pair_loss(wb.losses.simpo_loss, mean=True, reference=False, margin=0.7),
    "orpo": _pair_loss(wb.losses.orpo_loss, mean=True, reference=False, beta=0.4),
    "orpo, tokens": _orpo_tokens,
    "reward": lambda model, micro: wb.losses.reward_loss(
        *_rewards(model, micro), margin=micro["margin"], center=0.1
    ),
    "kto": wb.Coupled(_encoded, _kto),
    "distillation": _distilled(0.5),
    "forward KL": _distilled(0.0),
    "reverse KL": _distilled(1.0),
}


def units_of(name: str) -> Any:
    """The `units=` function that a loss of two terms needs."""
    if name != "orpo, tokens":
        return None
    return lambda micro: {
        "nll": (micro["chosen_labels"][:, 1:] != -100).sum(),
        "odds": len(micro["chosen"]),
    }


# ------------------------------------------------------------------- by plain torch


def _words(data: Batch, which: str, i: int) -> list[int]:
    """The places of the labels that count."""
    return [t for t in range(1, LONGEST) if data[f"{which}_labels"][i, t] != -100]


def _log(model: Policy, data: Batch, which: str, i: int, *, mean: bool = False) -> Tensor:
    logits, _ = model(data[which][i : i + 1])
    found = [logits[0, t - 1].log_softmax(0)[data[which][i, t]] for t in _words(data, which, i)]
    total = torch.stack(found).sum()
    return total / len(found) if mean else total


def _average(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def _delta(model: Policy, data: Batch, i: int, *, mean: bool) -> Tensor:
    chosen = _log(model, data, "chosen", i, mean=mean) - data["chosen_reference"][i]
    return chosen - (_log(model, data, "rejected", i, mean=mean) - data["rejected_reference"][i])


def _of_pairs(of_pair: Callable[[Policy, Batch, int], Tensor]) -> Callable[[Any, Batch], Tensor]:
    return lambda model, data: _average(
        [of_pair(model, data, i) for i in range(len(data["chosen"]))]
    )


def _smooth(model: Policy, data: Batch, i: int) -> Tensor:
    right = torch.sigmoid(0.1 * _delta(model, data, i, mean=False))
    return -0.9 * right.log() - 0.1 * (1 - right).log()


def _simpo(model: Policy, data: Batch, i: int) -> Tensor:
    chosen, rejected = (_log(model, data, w, i, mean=True) for w in ("chosen", "rejected"))
    return -torch.sigmoid(2.0 * (chosen - rejected) - 0.7).log()


def _odds(model: Policy, data: Batch, i: int) -> Tensor:
    chosen, rejected = (_log(model, data, w, i, mean=True).exp() for w in ("chosen", "rejected"))
    ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    return -torch.sigmoid(ratio.log()).log()


def _orpo(model: Policy, data: Batch, i: int) -> Tensor:
    return -_log(model, data, "chosen", i, mean=True) + 0.4 * _odds(model, data, i)


def _orpo_over_tokens(model: Policy, data: Batch) -> Tensor:
    number = range(len(data["chosen"]))
    logs = torch.stack([_log(model, data, "chosen", i) for i in number]).sum()
    nll = -logs / sum(len(_words(data, "chosen", i)) for i in number)
    return nll + 0.4 * _average([_odds(model, data, i) for i in number])


def _reward(model: Policy, data: Batch, i: int) -> Tensor:
    chosen, rejected = (model(data[w][i : i + 1])[1][0, -1] for w in ("chosen", "rejected"))
    gap: Tensor = chosen - rejected - data["margin"][i]
    both: Tensor = chosen + rejected
    return -torch.sigmoid(gap).log() + 0.1 * both**2


def _kto_by_hand(model: Policy, data: Batch) -> Tensor:
    number = range(len(data["chosen"]))
    with torch.no_grad():
        mismatched = [
            _log(model, data, "mismatched", i) - data["mismatched_reference"][i] + 8 for i in number
        ]
        z = max(_average(mismatched), torch.zeros((), dtype=torch.float64))
    losses = []
    for i in number:
        ratio = _log(model, data, "chosen", i) - data["chosen_reference"][i]
        if data["desirable"][i]:
            losses.append(1.2 * (1 - torch.sigmoid(0.3 * (ratio - z))))
        else:
            losses.append(0.7 * (1 - torch.sigmoid(0.3 * (z - ratio))))
    return _average(losses)


def _distilled_by_hand(beta: float) -> Callable[[Any, Batch], Tensor]:
    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum()

    def loss(model: Any, data: Batch) -> Tensor:
        found = []
        for i in range(len(data["chosen"])):
            logits, _ = model(data["chosen"][i : i + 1])
            for t in _words(data, "chosen", i):
                student = (logits[0, t - 1] / 1.5).softmax(0)
                teacher = (data["teacher"][i, t - 1] / 1.5).softmax(0)
                if beta in (0.0, 1.0):
                    found.append(kl(student, teacher) if beta else kl(teacher, student))
                    continue
                mixed = beta * teacher + (1 - beta) * student
                found.append(beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed))
        return _average(found)

    return loss


PLAIN: dict[str, Callable[[Any, Batch], Tensor]] = {
    "dpo": _of_pairs(lambda m, d, i: -torch.sigmoid(0.2 * _delta(m, d, i, mean=False)).log()),
    "cdpo": _of_pairs(_smooth),
    "ipo": _of_pairs(lambda m, d, i: (_delta(m, d, i, mean=True) - 1 / 0.4) ** 2),
    "simpo": _of_pairs(_simpo),
    "orpo": _of_pairs(_orpo),
    "orpo, tokens": _orpo_over_tokens,
    "reward": _of_pairs(_reward),
    "kto": _kto_by_hand,
    "distillation": _distilled_by_hand(0.5),
    "forward KL": _distilled_by_hand(0.0),
    "reverse KL": _distilled_by_hand(1.0),
}
