"""Wrong means that users of other trainers have reported: found by `verify_loop`, and made right.

Each pattern is written from the facts of its public thread; none of their code is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.losses.preferences import OURS, pairs
from tests.losses.problem import Policy, batch, ours
from tests.support import pieces
from wholebatch.verification import ZOO, Case, verify_loop

pytestmark = pytest.mark.slow
Rule = Callable[[Case, nn.Module, Sequence[Any]], list[Tensor]]


def _windows(data: dict[str, Tensor], uneven: Sequence[int]) -> Callable[..., list[Any]]:
    """Micro-batches of these sizes, or the same one again and again."""

    def window(steps: int, even: bool, rank: int) -> list[Any]:
        assert rank == 0
        if even:
            return [{n: leaf[:3] for n, leaf in data.items()} for _ in range(steps)]
        return pieces(
            data, [*uneven[: steps - 1], len(next(iter(data.values()))) - sum(uneven[: steps - 1])]
        )

    return window


CASES = {
    "language model": ZOO["lm"],
    **{
        mean: Case(mean, Policy, ours(mean), _windows(batch(), (1, 5, 4)))
        for mean in ("tokens", "sequences", "constant")
    },
    **{
        name: Case(name, Policy, OURS[name], _windows(pairs(), (1, 4, 2)))
        for name in ("dpo", "reward", "distillation")
    },
}


def means(case: Case, model: nn.Module, micros: Sequence[Any]) -> list[wb.Loss]:
    return [case.loss(model, micro) for micro in micros]


def averaged(case: Case, model: nn.Module, micros: Sequence[Any]) -> list[Tensor]:
    """The mean of each micro-batch, divided by their number."""
    return [one.total / one.units / len(micros) for one in means(case, model, micros)]


def added(case: Case, model: nn.Module, micros: Sequence[Any]) -> list[Tensor]:
    """The mean of each micro-batch, never divided: each of two places trusts the other to do it."""
    return [one.total / one.units for one in means(case, model, micros)]


def divided_twice(case: Case, model: nn.Module, micros: Sequence[Any]) -> list[Tensor]:
    """Divided by the window's tokens in the loss, and by the number of steps in the trainer."""
    losses = means(case, model, micros)
    tokens = sum(float(one.units) for one in losses)
    return [one.total / tokens / len(micros) for one in losses]


def over_the_generation(case: Case, model: nn.Module, micros: Sequence[Any]) -> list[Tensor]:
    """Divided by the tokens of a generation that feeds two windows."""
    losses = means(case, model, micros)
    tokens = 2 * sum(float(one.units) for one in losses)
    return [one.total / tokens for one in losses]


def weighed_by_samples(case: Case, model: nn.Module, micros: Sequence[Any]) -> list[Tensor]:
    """A token mean of each micro-batch, weighed by its share of the samples."""
    sizes = [len(next(iter(micro.values()))) for micro in micros]
    losses = means(case, model, micros)
    return [
        one.total / one.units * size / sum(sizes) for one, size in zip(losses, sizes, strict=True)
    ]


def without_the_number(case: Case, model: nn.Module, micros: Sequence[Any]) -> list[Tensor]:
    """Sums over the constant length, never divided by the sequences: the scale is the split's."""
    return [one.total / len(micros) for one in means(case, model, micros)]


def by_ranks(case: Case, model: nn.Module, micros: Sequence[Any]) -> list[Tensor]:
    """Two ranks: each divides by its own tokens, and then they are averaged."""
    result = []
    for own in (micros[:1], micros[1:]):
        losses = means(case, model, own)
        tokens = sum(float(one.units) for one in losses)
        result += [one.total / tokens / 2 for one in losses]
    return result


@dataclass(frozen=True)
class Issue:
    threads: str
    case: str
    rule: Rule
    mistake: str | None = None


ISSUES = [
    Issue("Lightning 20350 and 21386", "language model", averaged, "mean-of-means"),
    Issue("LLaMA-Factory 7443", "language model", added, "not-divided"),
    Issue("torchtitan 2206", "language model", by_ranks),
    Issue("trl 4719", "distillation", averaged, "mean-of-means"),
    Issue("trl 3021", "tokens", averaged, "mean-of-means"),
    Issue("trl 5619", "tokens", divided_twice, "divided-twice"),  # the division asked for
    Issue("trl 6024", "tokens", over_the_generation),
    Issue("verl 5625", "tokens", weighed_by_samples),
    Issue("verl 7321", "tokens", averaged, "mean-of-means"),
    Issue("verl 3741", "constant", without_the_number),
    Issue("ms-swift 10117", "tokens", divided_twice, "divided-twice"),
    Issue("prime-rl 2358", "tokens", by_ranks),
    Issue("transformers 35856 and trl 5710", "dpo", added, "not-divided"),
    Issue("trl 4104", "reward", averaged, "mean-of-means"),
]


def loop_of(case: Case, rule: Rule) -> Callable[[Any, Any, Any], None]:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, micros: Sequence[Any]) -> None:
        for loss in rule(case, model, micros):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.threads)
def test_the_pattern_is_found(issue: Issue) -> None:
    case = CASES[issue.case]
    verdict = verify_loop(loop_of(case, issue.rule), case=case)
    assert not verdict.same
    if issue.mistake is not None:
        assert issue.mistake in verdict.mistakes, verdict


@pytest.mark.parametrize("name", sorted({issue.case for issue in ISSUES}))
def test_the_update_is_right_through_us(name: str) -> None:
    case = CASES[name]

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, micros: Sequence[Any]) -> None:
        acc = wb.Accumulator(model, optimizer, steps=len(micros))
        for micro in acc.over(micros):
            acc.backward(case.loss(model, micro))

    verdict = verify_loop(loop, case=case)
    assert verdict.same, verdict
