"""Losses that compare the samples of a batch, given as if they did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.mistakes.catalogue import (
    CLASSIFIERS,
    COUPLES,
    EVERYWHERE,
    STREAMS,
    mistake,
    samples_of,
    similarity,
)
from tests.mistakes.task import Batch, Mean, Sum, Task


@mistake(COUPLES, listed=True, interfaces=("WholeBatch",))
def a_contrastive_loss_by_our_cross_entropy(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, losses = samples_of(task, model, micro)
        return wb.cross_entropy(similarity(z, losses), torch.arange(len(z)))

    return task.but(loss=loss)


@mistake(COUPLES, listed=True, interfaces=EVERYWHERE)
def a_contrastive_loss_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, losses = samples_of(task, model, micro)
        total = F.cross_entropy(similarity(z, losses), torch.arange(len(z)), reduction="sum")
        return Sum(total, len(z))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(COUPLES, listed=True, interfaces=EVERYWHERE)
def a_contrastive_loss_as_a_mean(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, losses = samples_of(task, model, micro)
        return Mean(F.cross_entropy(similarity(z, losses), torch.arange(len(z))), len(z))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(COUPLES, listed=True, interfaces=("WholeBatch", *STREAMS))
def info_nce_without_coupled(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, _ = samples_of(task, model, micro)
        return wb.losses.info_nce(z, z.flip(1))

    return task.but(loss=loss)


def coupled(term: Callable[[Tensor, Tensor, Batch], Tensor]) -> Callable[[Task], Task]:
    """A loss whose mean over a batch has a term of the whole batch: `term(z, losses, micro)`."""

    def plant(task: Task) -> Task:
        def loss(model: nn.Module, micro: Batch) -> Any:
            z, losses = samples_of(task, model, micro)
            return Mean(losses.mean() + term(z, losses, micro), len(z))

        return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))

    return plant


@mistake(COUPLES)
def batch_hard_mining(task: Task) -> Task:
    def term(z: Tensor, losses: Tensor, micro: Batch) -> Tensor:
        z = F.normalize(torch.cat([z, losses[:, None]], 1), dim=1)
        apart = torch.cdist(z, z) + 100.0 * torch.eye(len(z), dtype=z.dtype)
        return F.softplus(-apart.min(1).values).mean()

    return coupled(term)(task)


@mistake(COUPLES)
def variance_over_the_batch(task: Task) -> Task:
    return coupled(lambda z, *_: F.relu(3 - (z.var(0, unbiased=False) + 1e-3).sqrt()).mean())(task)


@mistake(COUPLES)
def redundancy_over_the_batch(task: Task) -> Task:
    def term(z: Tensor, losses: Tensor, micro: Batch) -> Tensor:
        z = z - z.mean(0)
        return (z.T @ z / len(z)).square().mean()

    return coupled(term)(task)


@mistake(COUPLES)
def dice_over_the_batch(task: Task) -> Task:
    def term(z: Tensor, losses: Tensor, micro: Batch) -> Tensor:
        p, y = z.sigmoid(), (torch.arange(z.shape[1]) % 2).to(z.dtype)
        return 1 - 2 * (p * y).sum() / (p.square().sum() + y.sum() * len(z) + 1)

    return coupled(term)(task)


@mistake(COUPLES)
def entropy_of_the_mean_prediction(task: Task) -> Task:
    def term(z: Tensor, losses: Tensor, micro: Batch) -> Tensor:
        p = torch.cat([z, z.new_zeros(len(z), 1)], 1).softmax(1).mean(0)
        return (p * p.log()).sum()

    return coupled(term)(task)


@mistake(COUPLES)
def correlation_with_a_target(task: Task) -> Task:
    def term(z: Tensor, losses: Tensor, micro: Batch) -> Tensor:
        a = z[:, 0] - z[:, 0].mean()
        b = losses.detach() - losses.detach().mean()
        return 1 - (a * b).sum() / (a.norm() * b.norm() + 0.1)

    return coupled(term)(task)


@mistake(COUPLES)
def pairwise_ranking(task: Task) -> Task:
    def term(z: Tensor, losses: Tensor, micro: Batch) -> Tensor:
        score = 4.0 * z[:, 0] + losses
        return F.softplus(score[:, None] - score[None]).triu(1).sum() / len(z) ** 2

    return coupled(term)(task)


@mistake(COUPLES + "|units")
def hardest_half_of_the_batch(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        keep = max(1, len(losses) // 2)
        return Sum(losses.topk(keep).values.sum(), keep)

    return task.but(loss=loss, announced=lambda micro: max(1, len(next(iter(micro.values()))) // 2))


@mistake(COUPLES)
def weights_by_rank_in_the_batch(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        place = losses.detach().argsort().argsort().to(losses.dtype)
        return Mean((losses * place).sum() / place.sum().clamp(min=1), len(losses))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(COUPLES)
def losses_divided_by_their_largest(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        return Sum((losses / losses.detach().abs().max()).sum(), len(losses))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(COUPLES)
def losses_divided_by_their_own_mean(task: Task) -> Task:
    """The total is the number of samples whatever they are: only gradients tell."""

    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        return Sum((losses / losses.detach().mean()).sum(), len(losses))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(COUPLES)
def advantages_normalised_in_the_micro_batch(task: Task) -> Task:
    """The total is near 0 whatever the samples are: only gradients tell."""

    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        reward = losses.detach().sin()
        advantage = (reward - reward.mean()) / (reward.std(unbiased=False) + 0.01)
        return Sum((losses * advantage).sum(), len(losses))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(COUPLES + "|mean", only=CLASSIFIERS)
def class_weights_by_frequency_in_the_batch(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        count = torch.bincount(micro["y"], minlength=8).to(losses.dtype)
        return Sum((losses / count[micro["y"]]).sum(), len(losses))

    return task.but(loss=loss)


# Nothing is told of draws that cannot be held in a loss that runs a backward of its own.
@mistake(COUPLES + "|random", never=frozenset({"physics"}))
def negatives_drawn_from_the_batch(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, losses = samples_of(task, model, micro)
        negative = z[torch.randperm(len(z))]
        return Sum(losses.sum() + F.softplus((z * negative).sum(1)).sum(), len(z))

    return task.but(loss=loss, random=True, announced=lambda micro: len(next(iter(micro.values()))))
