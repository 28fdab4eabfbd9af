"""examples/train_grpo.py: the update does not depend on how the completions are cut."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from wholebatch.testing import assert_split_invariant

SAMPLES, KL = 16, 0.02
MEANS = ("tokens", "sequences", "constant")


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module("train_grpo")


def start(grpo: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A policy that has moved from the one that sampled, in float64, and its completions."""
    torch.manual_seed(0)
    policy = grpo.Policy().double()
    old = copy.deepcopy(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.1 * torch.randn_like(p)
    draw = torch.Generator().manual_seed(1)
    return policy, grpo.rollout(old, old, prompts=4, group=4, draw=draw)


def by_plain_torch(grpo: Any, mean: str) -> nn.Module:
    """The update of the undivided batch, as the papers write it."""
    policy, batch = start(grpo)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    logprobs, mask = policy.of_tokens(batch["tokens"]), batch["mask"].double()
    ratio, advantages = (logprobs - batch["old"]).exp(), batch["advantages"][:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
    if mean == "tokens":
        total = loss.sum() / mask.sum()
    elif mean == "sequences":
        total = (loss.sum(1) / mask.sum(1)).mean()
    else:
        total = loss.sum() / (SAMPLES * grpo.LONGEST)
    apart = batch["reference"] - logprobs
    kl = ((apart.exp() - 1 - apart) * mask).sum(1) / mask.sum(1)
    (total + KL * kl.mean()).backward()
    gradients = [p.grad for p in policy.parameters()]
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
    torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))  # as wholebatch clips
    optimizer.step()
    return policy


def train(size: int, *, grpo: Any, mean: str, budget: bool, execute: str = "eager") -> nn.Module:
    """Make one update in micro-batches of so many samples, or of so many padded tokens."""
    if size == (1000 if budget else SAMPLES):
        return by_plain_torch(grpo, mean)
    policy, batch = start(grpo)
    update = grpo.make_update(
        policy, mean, wb.tokens(size, mask="mask") if budget else size, execute
    )
    if execute == "compile":
        update._runner.executor._plan.compiles = False  # as traced: compiling takes a minute
    step = update.step(batch)
    assert step.micro_batches > 1
    if execute == "compile":
        assert update._runner.executor.mode == "operations", update._runner.executor.notes.history
    return policy


@pytest.mark.parametrize("mean", MEANS)
def test_one_denominator_however_the_completions_are_cut(grpo: Any, mean: str) -> None:
    of_samples = partial(train, grpo=grpo, mean=mean, budget=False)
    assert_split_invariant(of_samples, (SAMPLES, 1, 2, 4), tolerance=1e-12)
    of_tokens = partial(of_samples, budget=True)
    assert_split_invariant(of_tokens, (1000, 70, 33), tolerance=1e-12)


def test_as_a_graph_for_each_shape(grpo: Any) -> None:
    of_samples = partial(train, grpo=grpo, mean="tokens", budget=False, execute="compile")
    assert_split_invariant(of_samples, (SAMPLES, 4), tolerance=1e-12)
