"""State that a forward or a loss function keeps, and layers that mix the samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.mistakes.catalogue import COUPLES, EVERYWHERE, LOOKING, MOVES, mistake, samples_of
from tests.mistakes.kinds import RANDOM, WITH_BATCHNORM
from tests.mistakes.states import (
    Capacity,
    CarriedState,
    Centred,
    Codebook,
    Counter,
    FunctionalBatchNorm,
    HalvedByStatistic,
    MixedUp,
    Observer,
    OwnBatchNorm,
    OwnSpectralNorm,
    ScaledByStatistic,
    SoftmaxOverSamples,
    TorchSpectralNorm,
    Wrapped,
    clamp_gradient,
    normalise_gradient,
)
from tests.mistakes.task import Batch, Sum, Task


def around(kind: Callable[[Tensor], nn.Module]) -> Callable[[Task], Task]:
    """Put a module of the user's own behind the model; `kind` is given an output to size it."""

    def plant(task: Task) -> Task:
        seen: list[Tensor] = []
        handle_of = copy.deepcopy(task.model)
        handle_of.register_forward_hook(
            lambda _m, _a, out: seen.append(
                out.logits if hasattr(out, "logits") else out if isinstance(out, Tensor) else out[0]
            )
        )
        with torch.random.fork_rng():
            task.forward(handle_of, task.batch)
            torch.manual_seed(1)
            inner = kind(seen[0].detach()).double()
        return task.but(model=Wrapped(task.model, inner))

    return plant


STATE = {"listed": True, "interfaces": EVERYWHERE, "never": frozenset(WITH_BATCHNORM)}


@mistake(MOVES, **STATE)
def a_running_mean_that_centres(task: Task) -> Task:
    return around(Centred)(task)


@mistake(MOVES, **STATE)
def a_codebook_by_moving_averages(task: Task) -> Task:
    return around(Codebook)(task)


@mistake(MOVES, **STATE)
def a_counter_that_the_forward_reads(task: Task) -> Task:
    return around(Counter)(task)


@mistake(MOVES + "|" + COUPLES, **STATE)
def an_observer_of_the_range(task: Task) -> Task:
    return around(Observer)(task)


@mistake(MOVES + "|spectral", **STATE)
def a_power_iteration_by_hand(task: Task) -> Task:
    return around(OwnSpectralNorm)(task)


@mistake(MOVES + "|spectral", interfaces=EVERYWHERE, never=frozenset(WITH_BATCHNORM))
def torchs_spectral_norm(task: Task) -> Task:
    return around(TorchSpectralNorm)(task)


@mistake(MOVES + "|" + COUPLES + "|BatchNorm", **STATE)
def a_batchnorm_of_ones_own(task: Task) -> Task:
    return around(OwnBatchNorm)(task)


@mistake(MOVES, interfaces=EVERYWHERE, never=frozenset(WITH_BATCHNORM))
def a_hidden_state_that_is_carried_over(task: Task) -> Task:
    return around(CarriedState)(task)


@mistake(COUPLES + "|BatchNorm|batch_norm")
def batch_norm_as_a_function(task: Task) -> Task:
    return around(FunctionalBatchNorm)(task)


@mistake(COUPLES)
def a_softmax_over_the_samples(task: Task) -> Task:
    return around(SoftmaxOverSamples)(task)


@mistake(COUPLES)
def a_capacity_of_experts(task: Task) -> Task:
    return around(Capacity)(task)


@mistake(COUPLES)
def outputs_scaled_by_a_statistic_of_the_batch(task: Task) -> Task:
    return around(ScaledByStatistic)(task)


@mistake(COUPLES, interfaces=("WholeBatch",), samples=8)
def outputs_halved_by_a_statistic_of_the_batch(task: Task) -> Task:
    """A decision that eight samples show and five may not: a micro-batch of five tests five."""
    return around(HalvedByStatistic)(task)


@mistake(COUPLES)
def samples_mixed_with_their_neighbours(task: Task) -> Task:
    return around(MixedUp)(task)


@mistake(r"gradient|" + COUPLES, interfaces=LOOKING)
def a_gradient_normalised_in_the_backward(task: Task) -> Task:
    return around(lambda out: normalise_gradient())(task)


@mistake(r"gradient", interfaces=LOOKING)
def a_gradient_clamped_in_the_backward(task: Task) -> Task:
    return around(lambda out: clamp_gradient(len(out)))(task)


@mistake(MOVES)
def a_moving_baseline_in_the_loss(task: Task) -> Task:
    baseline = torch.zeros((), dtype=torch.float64)

    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        baseline.mul_(0.8).add_(losses.detach().mean(), alpha=0.2)
        return Sum((losses * (losses.detach() - baseline)).sum(), len(losses))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(MOVES)
def a_weight_that_grows_with_every_call_of_the_loss(task: Task) -> Task:
    calls = [0]

    def loss(model: nn.Module, micro: Batch) -> Any:
        calls[0] += 1
        given = task.sum(model, micro)
        return Sum(given.value * min(1.0, calls[0] / 20), given.units)

    return task.but(loss=loss)


@mistake(MOVES + "|" + COUPLES)
def a_queue_of_negatives(task: Task) -> Task:
    queue: list[Tensor] = []

    def loss(model: nn.Module, micro: Batch) -> Any:
        z, losses = samples_of(task, model, micro)
        total = losses.sum()
        if queue:
            total = total + F.softplus(z @ queue[-1].T).mean(1).sum()
        queue.append(z.detach())
        return Sum(total, len(z))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(MOVES, never=frozenset(RANDOM | WITH_BATCHNORM))
def a_teacher_moved_by_the_loss(task: Task) -> Task:
    teacher = copy.deepcopy(task.model)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(0.5)

    def loss(model: nn.Module, micro: Batch) -> Any:
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.3)
        z, losses = samples_of(task, model, micro)
        with torch.set_grad_enabled(task.name == "physics"):
            goal, _ = samples_of(task, teacher, micro)
        return Sum(losses.sum() + (z - goal.detach()).square().sum(), len(z))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(MOVES, only=frozenset(WITH_BATCHNORM), interfaces=("WholeBatch",))
def a_weight_by_batchnorms_own_counter(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        norm = next(m for m in model.modules() if hasattr(m, "num_batches_tracked"))
        return Sum(given.value / (1.0 + norm.num_batches_tracked), given.units)

    return task.but(loss=loss)
