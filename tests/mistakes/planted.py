"""Mistakes that make an update other than that of the undivided batch, to be planted in a task."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.mistakes.models import RANDOM, WITH_BATCHNORM
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
    SoftmaxOverSamples,
    TorchSpectralNorm,
    Wrapped,
    clamp_gradient,
    normalise_gradient,
)
from tests.mistakes.task import Batch, Mean, Moment, Sum, Task, features, quotient

# Doors that see or own the forward can hold a micro-batch against its halves.
LOOKING = ("WholeBatch", "Lightning", "Trainer")
STREAMS = ("Accumulator", "Accumulator, counted", "Accelerate", "Fabric")
EVERYWHERE = (*LOOKING, *STREAMS)

COUPLES = r"coupl|compar|depends? on .*(others|samples)|other samples"
MOVES = r"state|buffer|moves|changes .*forward|forward .*(changes|moves)|counter"
SUMS = r"add up|adds up|\bsum\b|coupl|regularis"
IS_MEAN = r"\bmean\b"
TOUCHED = r"window|gradient|between"


@dataclass(frozen=True)
class Mistake:
    name: str
    plant: Callable[[Task], Task]
    words: str  # what an error or warning must contain
    doors: tuple[str, ...] = LOOKING
    listed: bool = False  # in the issue's own table
    only: frozenset[str] | None = None  # the kinds of models that it fits; None: all
    never: frozenset[str] = frozenset()
    windows: int = 1
    moves: bool = False  # the user's own line changes parameters, whatever the library does


MISTAKES: list[Mistake] = []
MASKED = frozenset({"transformer", "checkpointed", "lstm", "packed gru", "tied language model"})
CLASSIFIERS = frozenset({"mlp", "cnn with groupnorm", "lora on a frozen base", "custom function"})


def mistake(words: str, **more: Any) -> Callable[[Callable[[Task], Task]], Callable[[Task], Task]]:
    """Put a function into the catalogue; its name is the mistake's."""

    def keep(plant: Callable[[Task], Task]) -> Callable[[Task], Task]:
        name = plant.__name__.replace("_", " ")
        MISTAKES.append(Mistake(name, plant, words, **more))
        return plant

    return keep


def samples_of(task: Task, model: nn.Module, micro: Batch) -> tuple[Tensor, Tensor]:
    """Features and the loss of each sample."""
    out = task.forward(model, micro)
    losses = task.losses(out, micro) * task.weights(micro)
    return features(out), losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def similarity(z: Tensor, losses: Tensor) -> Tensor:
    z = F.normalize(torch.cat([z, losses[:, None]], 1), dim=1)
    return z @ z.T * 3.0


# losses that compare the samples of a batch


@mistake(COUPLES, listed=True, doors=("WholeBatch",))
def a_contrastive_loss_by_our_cross_entropy(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, losses = samples_of(task, model, micro)
        return wb.cross_entropy(similarity(z, losses), torch.arange(len(z)))

    return task.but(loss=loss)


@mistake(COUPLES, listed=True, doors=EVERYWHERE)
def a_contrastive_loss_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, losses = samples_of(task, model, micro)
        total = F.cross_entropy(similarity(z, losses), torch.arange(len(z)), reduction="sum")
        return Sum(total, len(z))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(COUPLES, listed=True, doors=EVERYWHERE)
def a_contrastive_loss_as_a_mean(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, losses = samples_of(task, model, micro)
        return Mean(F.cross_entropy(similarity(z, losses), torch.arange(len(z))), len(z))

    return task.but(loss=loss, announced=lambda micro: len(next(iter(micro.values()))))


@mistake(COUPLES, listed=True, doors=("WholeBatch", *STREAMS))
def info_nce_without_coupled(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, _ = samples_of(task, model, micro)
        return wb.info_nce(z, z.flip(1))

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
        score = z[:, 0]
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


@mistake(COUPLES, only=CLASSIFIERS)
def class_weights_by_frequency_in_the_batch(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        count = torch.bincount(micro["y"], minlength=8).to(losses.dtype)
        return Sum((losses / count[micro["y"]]).sum(), len(losses))

    return task.but(loss=loss)


@mistake(COUPLES + "|random")
def negatives_drawn_from_the_batch(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        z, losses = samples_of(task, model, micro)
        negative = z[torch.randperm(len(z))]
        return Sum(losses.sum() + F.softplus((z * negative).sum(1)).sum(), len(z))

    return task.but(loss=loss, random=True, announced=lambda micro: len(next(iter(micro.values()))))


# sums, means and units


@mistake(IS_MEAN, listed=True, doors=("WholeBatch", *STREAMS))
def a_mean_given_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        _, losses = samples_of(task, model, micro)
        return Sum(losses.mean(), len(losses))

    return task.but(loss=loss, truth=lambda model, batch: loss(model, batch).value)


@mistake(IS_MEAN, listed=True, doors=("WholeBatch", *STREAMS), only=CLASSIFIERS)
def torchs_mean_cross_entropy_given_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        out = task.forward(model, micro)
        return Sum(F.cross_entropy(out, micro["y"]), len(out))

    return task.but(loss=loss, truth=lambda model, batch: loss(model, batch).value)


@mistake(IS_MEAN, doors=("WholeBatch", *STREAMS))
def a_sum_divided_by_its_units_given_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Sum(given.value / given.units, given.units)

    return task.but(loss=loss, truth=lambda model, batch: loss(model, batch).value)


@mistake(IS_MEAN, doors=("WholeBatch", *STREAMS), only=frozenset({"gpt2", "bert"}))
def the_models_own_mean_given_as_a_sum(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        labels = micro["x"].masked_fill(~micro["mask"], -100)
        ways = {"input_ids": micro["x"], "attention_mask": micro["mask"].long()}
        counted = labels[:, 1:] if task.name == "gpt2" else labels
        return Sum(model(**ways, labels=labels).loss, (counted != -100).sum())

    return task.but(loss=loss, truth=lambda model, batch: loss(model, batch).value)


@mistake(r"\bsum\b|add up", doors=EVERYWHERE, only=CLASSIFIERS)
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


@mistake(r"mean|units", doors=("WholeBatch", "Lightning"))
def a_mean_of_one_unit(task: Task) -> Task:
    """What `loss / len(batch)` and one unit per micro-batch are: a mean of means."""

    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Sum(given.value / given.units, 1)

    return task.but(loss=loss)


@mistake(r"padd|units|add up", only=MASKED)
def a_mean_of_tokens_with_padding_in_its_units(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Mean(given.value / given.units, micro["mask"].numel())

    return task.but(loss=loss, announced=lambda micro: micro["mask"].numel())


@mistake(r"units", only=MASKED, doors=("WholeBatch",))
def units_announced_with_padding(task: Task) -> Task:
    return task.but(options={"units": lambda micro: micro["mask"].numel()})


@mistake(r"units", only=MASKED, doors=("WholeBatch",))
def samples_announced_for_a_loss_over_tokens(task: Task) -> Task:
    return task.but(options={"units": lambda micro: len(micro["mask"])})


@mistake(SUMS)
def a_regulariser_in_every_micro_batch(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        size = sum(p.abs().square().sum() for p in model.parameters() if p.requires_grad)
        return Sum(given.value + 0.5 * size, given.units)

    return task.but(loss=loss)


@mistake(r"steps|divided|divid", doors=(*STREAMS, "Lightning", "Trainer"))
def a_loss_still_divided_by_the_steps(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Sum(given.value / task.steps, given.units)

    return task.but(loss=loss, truth=lambda model, batch: quotient(task.sum(model, batch)))


@mistake(r"finite|nan", listed=True, doors=EVERYWHERE)
def a_sample_that_is_not_a_number(task: Task) -> Task:
    size = len(next(iter(task.batch.values())))
    flaw = torch.zeros(size, dtype=torch.float64)
    flaw[size // 2] = float("nan")

    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        return Sum(given.value * (1 + micro["flaw"].sum()), given.units)

    return task.but(loss=loss, batch={**task.batch, "flaw": flaw})


# state that a forward, or the loss function, keeps


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


STATE = {"listed": True, "doors": EVERYWHERE, "never": frozenset(WITH_BATCHNORM)}


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


@mistake(MOVES + "|spectral", doors=EVERYWHERE, never=frozenset(WITH_BATCHNORM))
def torchs_spectral_norm(task: Task) -> Task:
    return around(TorchSpectralNorm)(task)


@mistake(MOVES + "|" + COUPLES + "|BatchNorm", **STATE)
def a_batchnorm_of_ones_own(task: Task) -> Task:
    return around(OwnBatchNorm)(task)


@mistake(MOVES, doors=EVERYWHERE, never=frozenset(WITH_BATCHNORM))
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
def outputs_halved_by_a_statistic_of_the_batch(task: Task) -> Task:
    return around(HalvedByStatistic)(task)


@mistake(COUPLES)
def samples_mixed_with_their_neighbours(task: Task) -> Task:
    return around(MixedUp)(task)


@mistake(r"gradient", doors=LOOKING)
def a_gradient_normalised_in_the_backward(task: Task) -> Task:
    return around(lambda out: normalise_gradient())(task)


@mistake(r"gradient", doors=LOOKING)
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


@mistake(MOVES, only=frozenset(WITH_BATCHNORM), doors=("WholeBatch",))
def a_weight_by_batchnorms_own_counter(task: Task) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        given = task.sum(model, micro)
        norm = next(m for m in model.modules() if hasattr(m, "num_batches_tracked"))
        return Sum(given.value / (1.0 + norm.num_batches_tracked), given.units)

    return task.but(loss=loss)


# lines that a loop has kept

LOOP = ("WholeBatch", "Accumulator", "Accumulator, counted", "Accelerate", "Fabric")


def in_the_loop(line: Callable[[Moment], None]) -> Callable[[Task], Task]:
    """A line after every backward of a window but its last one."""

    def stands(moment: Moment) -> None:
        if moment.place == "after backward" and not moment.last:
            line(moment)

    return lambda task: task.but(line=stands)


@mistake(TOUCHED, doors=(*LOOP, "Lightning", "Trainer"))
def zero_grad_kept_in_the_loop(task: Task) -> Task:
    return in_the_loop(lambda moment: moment.model.zero_grad())(task)


@mistake(TOUCHED, moves=True, doors=("WholeBatch", "Accumulator", "Accumulator, counted", "Fabric"))
def the_optimizers_step_kept_in_the_loop(task: Task) -> Task:
    return in_the_loop(lambda moment: moment.optimizer.step())(task)


@mistake(TOUCHED, doors=LOOP)
def a_plain_backward_beside(task: Task) -> Task:
    def line(moment: Moment) -> None:
        if moment.number == 0 and moment.micro is not None:
            quotient(task.sum(moment.model, moment.micro)).backward()

    return in_the_loop(line)(task)


@mistake(TOUCHED + "|clip", doors=(*LOOP, "Lightning", "Trainer"))
def clipping_kept_in_the_loop(task: Task) -> Task:
    return in_the_loop(lambda m: nn.utils.clip_grad_norm_(m.model.parameters(), 1e-3) and None)(
        task
    )


@mistake(r"learning rate|schedul|\blr\b", doors=(*LOOP, "Lightning", "Trainer"))
def the_schedule_kept_in_the_loop(task: Task) -> Task:
    def line(moment: Moment) -> None:
        for group in moment.optimizer.param_groups:
            group["lr"] *= 0.9

    return in_the_loop(line)(task)


@mistake(
    r"parameter|changed in the middle|modified by an inplace",
    moves=True,
    doors=(*LOOP, "Lightning", "Trainer"),
)
def weights_decayed_in_the_loop(task: Task) -> Task:
    @torch.no_grad()
    def line(moment: Moment) -> None:
        for p in moment.model.parameters():
            p.mul_(0.99)

    return in_the_loop(line)(task)


@mistake(r"froz|requires_grad|freez|grad", doors=(*LOOP, "Lightning", "Trainer"))
def a_parameter_frozen_in_the_window(task: Task) -> Task:
    def line(moment: Moment) -> None:
        trained = [p for p in moment.model.parameters() if p.requires_grad]
        if moment.number == 0:
            trained[-1].requires_grad_(False)

    return in_the_loop(line)(task)


@mistake(r"gradient", listed=True, doors=EVERYWHERE)
def gradients_left_from_before(task: Task) -> Task:
    def line(moment: Moment) -> None:
        if moment.place == "start":
            model, batch = moment.model, task.batch
            state = copy.deepcopy(list(model.buffers()))
            quotient(task.sum(model, batch)).backward()
            for now, was in zip(model.buffers(), state, strict=True):
                now.copy_(was)

    return task.but(line=line)


@mistake(r"gradient|clear", listed=True, doors=("Fabric, never cleared",), windows=2)
def gradients_that_the_loop_never_clears(task: Task) -> Task:
    return task


@mistake(r"accumulate", listed=True, doors=("Accelerate without accumulate()",))
def a_loop_without_accumulate(task: Task) -> Task:
    return task


@mistake(r"steps", listed=True, doors=("Accelerate's accumulator without steps",))
def an_accumulator_without_steps(task: Task) -> Task:
    return task


@mistake(
    r"never",
    listed=True,
    # Lightning runs backward inside the optimizer's step, after its hooks, divided or not.
    doors=tuple(door for door in EVERYWHERE if door != "Lightning"),
    never=frozenset({"complex"} | RANDOM),
)
def a_step_hook_that_wants_whole_gradients(task: Task) -> Task:
    """Not a mistake: it must be exact, with a fused optimizer in float32 too."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.5, fused=True)

        def limit(*_: Any) -> None:
            for p in trained:
                if p.grad is not None:
                    p.grad.mul_(0.02 / p.grad.norm().clamp(min=0.02))

        optimizer.register_step_pre_hook(limit)
        return optimizer

    def single(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    batch = {name: single(leaf) for name, leaf in task.batch.items()}
    return task.but(model=task.model.float(), batch=batch, optimizer=make, tolerance=2e-5)


@mistake(
    r"units",
    listed=True,
    doors=("Trainer that prepares inputs",),
    only=frozenset({"weighted samples"}),
)
def units_counted_before_inputs_are_prepared(task: Task) -> Task:
    def truth(model: nn.Module, batch: Batch) -> Tensor:
        return quotient(task.sum(model, heavier(batch)))

    return task.but(truth=truth)


def heavier(micro: Batch) -> Batch:
    """The samples that weigh most: what a trainer's own `_prepare_inputs` leaves over."""
    keep = micro["weight"] > 0.4
    return {name: leaf[keep] for name, leaf in micro.items()}
