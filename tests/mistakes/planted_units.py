"""Sums, means and units that are given as each other, and numbers that are none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.mistakes.catalogue import (
    CLASSIFIERS,
    EVERYWHERE,
    IS_MEAN,
    MASKED,
    STREAMS,
    SUMS,
    mistake,
    samples_of,
)
from tests.mistakes.task import Batch, Mean, Sum, Task, quotient


@mistake(IS_MEAN, listed=True, interfaces=("WholeBatch", *STREAMS))
def a_mean_given_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        return Sum(losses.mean(), len(losses))

    return task.but(loss=loss, truth=lambda model, batch: loss(model, batch).value)


@mistake(IS_MEAN, listed=True, interfaces=("WholeBatch", *STREAMS), only=CLASSIFIERS)
def torchs_mean_cross_entropy_given_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        out = task.forward(model, micro)
        return Sum(F.cross_entropy(out, micro["y"]), len(out))

    return task.but(loss=loss, truth=lambda model, batch: loss(model, batch).value)


@mistake(IS_MEAN, interfaces=("WholeBatch", *STREAMS))
def a_sum_divided_by_its_units_given_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Sum(given.value / given.units, given.units)

    return task.but(loss=loss, truth=lambda model, batch: loss(model, batch).value)


@mistake(IS_MEAN, interfaces=("WholeBatch", *STREAMS), only=frozenset({"gpt2", "bert"}))
def the_models_own_mean_given_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        labels = micro["x"].masked_fill(~micro["mask"], -100)
        ways = {"input_ids": micro["x"], "attention_mask": micro["mask"].long()}
        counted = labels[:, 1:] if task.name == "gpt2" else labels
        return Sum(model(**ways, labels=labels).loss, (counted != -100).sum())

    return task.but(loss=loss, truth=lambda model, batch: loss(model, batch).value)


@mistake(r"\bsum\b|add up", interfaces=EVERYWHERE, only=CLASSIFIERS)
def torchs_summed_cross_entropy_given_as_a_mean(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        total = F.cross_entropy(task.forward(model, micro), micro["y"], reduction="sum")
        return Mean(total, len(micro["y"]))

    return task.but(loss=loss)


@mistake(r"\bsum\b|add up")
def a_sum_given_as_a_mean(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        losses = task.losses(task.forward(model, micro), micro)
        return Mean(losses.sum(), losses.numel())

    return task.but(loss=loss, announced=task.units)


@mistake(r"mean|units", interfaces=("WholeBatch", "Lightning", *STREAMS))
def a_mean_of_one_unit(task: Task) -> Task:
    """What `loss / len(batch)` and one unit per micro-batch are: a mean of means."""

    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Mean(given.value / given.units, 1)

    return task.but(loss=loss)


@mistake(r"padd|units|add up", only=MASKED)
def a_mean_of_tokens_with_padding_in_its_units(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Mean(given.value / given.units, micro["mask"].numel())

    return task.but(loss=loss, announced=lambda micro: micro["mask"].numel())


@mistake(r"units", only=MASKED, interfaces=("WholeBatch",))
def units_announced_with_padding(task: Task) -> Task:
    return task.but(options={"units": lambda micro: micro["mask"].numel()})


@mistake(r"units", only=MASKED, interfaces=("WholeBatch",))
def samples_announced_for_a_loss_over_tokens(task: Task) -> Task:
    return task.but(options={"units": lambda micro: len(micro["mask"])})


@mistake(SUMS)
def a_regulariser_in_every_micro_batch(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        size = sum(p.abs().square().sum() for p in model.parameters() if p.requires_grad)
        return Sum(given.value + 0.5 * size, given.units)

    return task.but(loss=loss)


@mistake(r"steps|divided|divid", interfaces=(*STREAMS, "Lightning", "Trainer"))
def a_loss_still_divided_by_the_steps(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Sum(given.value / task.steps, given.units)

    return task.but(loss=loss, truth=lambda model, batch: quotient(task.sum(model, batch)))


@mistake(r"finite|nan", listed=True, interfaces=EVERYWHERE)
def a_sample_that_is_not_a_number(task: Task) -> Task:
    size = len(next(iter(task.batch.values())))
    flaw = torch.zeros(size, dtype=torch.float64)
    flaw[size // 2] = float("nan")

    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Sum(given.value * (1 + micro["flaw"].sum()), given.units)

    return task.but(loss=loss, batch={**task.batch, "flaw": flaw})
