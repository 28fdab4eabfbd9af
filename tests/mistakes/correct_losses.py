"""Correct losses, of samples and of the whole batch."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.mistakes.cases import ALL, correct, net
from tests.mistakes.kinds import (
    classifier,
    classify,
    labelled,
    rows,
    run,
    squared,
    tokens,
)
from tests.mistakes.kinds import task as of_kind
from tests.mistakes.task import Batch, Mean, Sum, Task


@correct("WholeBatch")
def a_tensor_of_losses(draw: random.Random, samples: int) -> Task:
    made = classifier(net(), rows(samples, 5), 3)
    return made.but(loss=lambda m, b: classify(run(m, b), b))


@correct("WholeBatch", "Accumulator")
def class_weights_and_smoothing(draw: random.Random, samples: int) -> Task:
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

    def loss(model: nn.Module, micro: Batch) -> Any:
        return wb.cross_entropy(run(model, micro), micro["y"], weight=weight, label_smoothing=0.1)

    return classifier(net(), rows(samples, 5), 3).but(loss=loss)


@correct("WholeBatch", "Accumulator", "Accelerate", "Fabric", "Trainer")
def a_mean_with_its_units(draw: random.Random, samples: int) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        return Mean(F.cross_entropy(run(model, micro), micro["y"]), len(micro["y"]))

    return classifier(net(), rows(samples, 5), 3).but(loss=loss)


@correct("WholeBatch", "Accumulator")
def a_sum_scaled_by_a_constant(draw: random.Random, samples: int) -> Task:
    made = classifier(net(), rows(samples, 5), 3)

    def loss(model: nn.Module, micro: Batch) -> Any:
        given = made.sum(model, micro)
        return Sum(0.37 * given.value, given.units)

    return made.but(loss=loss)


@correct("WholeBatch", "Accumulator")
def means_within_samples_summed(draw: random.Random, samples: int) -> Task:
    """A mean over the pixels of each sample, summed over samples: `mean` is in the graph."""
    made = Task("", net(5, 4), {"x": rows(samples, 5), "y": rows(samples, 4)}, run, squared)

    def loss(model: nn.Module, micro: Batch) -> Any:
        return Sum((run(model, micro) - micro["y"]).square().mean(1).sum(), len(micro["x"]))

    return made.but(loss=loss)


@correct("WholeBatch", "Accumulator")
def a_mean_times_its_units_as_a_sum(draw: random.Random, samples: int) -> Task:
    """A mean made into a sum by hand: correct, though `mean` is in the graph."""

    def loss(model: nn.Module, micro: Batch) -> Any:
        number = len(micro["y"])
        return Sum(F.cross_entropy(run(model, micro), micro["y"]) * number, number)

    return classifier(net(), rows(samples, 5), 3).but(loss=loss)


@correct("WholeBatch", "Accumulator", "Lightning")
def a_regulariser_in_proportion(draw: random.Random, samples: int) -> Task:
    made = classifier(net(), rows(samples, 5), 3)

    def loss(model: nn.Module, micro: Batch) -> Any:
        given = made.sum(model, micro)
        size = sum(p.square().sum() for p in model.parameters())
        return Sum(given.value + 0.1 * given.units * size, given.units)

    return made.but(loss=loss)


@correct(*ALL)
def many_labels(draw: random.Random, samples: int) -> Task:
    weight = torch.rand(4).double() + 1
    batch = {"x": rows(samples, 5), "y": (rows(samples, 4) > 0).double()}
    return Task(
        *("", net(5, 4), batch, run),
        lambda out, b: F.binary_cross_entropy_with_logits(
            out, b["y"], pos_weight=weight, reduction="none"
        ).mean(1),
    )


@correct("WholeBatch", "Accumulator", "Trainer")
def counts_by_poisson(draw: random.Random, samples: int) -> Task:
    batch = {"x": rows(samples, 5), "y": torch.randint(0, 9, (samples,)).double()}
    return Task(
        *("", net(5, 1), batch, lambda m, b: run(m, b)[:, 0]),
        lambda out, b: F.poisson_nll_loss(out, b["y"], reduction="none"),
    )


@correct("WholeBatch", "Fabric")
def a_learned_variance(draw: random.Random, samples: int) -> Task:
    batch = {"x": rows(samples, 5), "y": rows(samples, 1)}
    return Task(
        *("", net(5, 2), batch, run),
        lambda out, b: F.gaussian_nll_loss(
            out[:, :1], b["y"], out[:, 1:].exp(), reduction="none"
        ).sum(1),
    )


@correct("WholeBatch", "Accumulator", "Lightning")
def alignments(draw: random.Random, samples: int) -> Task:
    """CTC: sequences of different lengths on both sides."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LogSoftmax(-1)).double()
    batch = {
        "x": torch.randn(samples, 7, 4).double(),
        "y": torch.randint(1, 6, (samples, 3)),
        "frames": torch.randint(5, 8, (samples,)),
        "letters": torch.randint(1, 3, (samples,)),
    }

    def losses(out: Tensor, micro: Batch) -> Tensor:
        ways = (micro["y"], micro["frames"], micro["letters"])
        return F.ctc_loss(out.transpose(0, 1), *ways, reduction="none")

    return Task("", model, batch, run, losses, lambda b: torch.ones(len(b["x"])).double())


class Margin(nn.Module):
    """ArcFace: cosines to learned centres, with a margin for the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.centres = net(5, 4), nn.Parameter(rows(3, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cosine = F.normalize(self.net(x)) @ F.normalize(self.centres).T
        return 4 * (cosine - 0.2 * F.one_hot(y, 3))


@correct("WholeBatch", "Accelerate")
def a_margin_head(draw: random.Random, samples: int) -> Task:
    batch = labelled(rows(samples, 5), 3)
    return Task("", Margin(), batch, lambda m, b: m(b["x"], b["y"]), classify)


@correct("WholeBatch", "Accumulator", "Trainer")
def preferences_against_a_reference(draw: random.Random, samples: int) -> Task:
    """DPO: log-probabilities of two answers, beside those of a frozen copy."""
    model = net(5, 4)
    reference = copy.deepcopy(model).requires_grad_(False)
    batch = {"x": rows(samples, 5), "good": torch.randint(0, 4, (samples,))}

    def forward(policy: nn.Module, micro: Batch) -> Tensor:
        bad = (micro["good"] + 1) % 4
        now, old = policy(micro["x"]).log_softmax(1), reference(micro["x"]).log_softmax(1)
        rows_of = torch.arange(len(bad))
        gain = (now - old)[rows_of, micro["good"]] - (now - old)[rows_of, bad]
        return gain + now[rows_of, micro["good"]]

    return Task("", model, batch, forward, lambda out, b: -F.logsigmoid(2.0 * out))


@correct("WholeBatch", "Fabric")
def distillation_from_a_teacher(draw: random.Random, samples: int) -> Task:
    """The teacher has a BatchNorm, in evaluation mode."""
    teacher = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double().eval()
    teacher.requires_grad_(False)

    def losses(out: Tensor, micro: Batch) -> Tensor:
        goal = teacher(micro["x"]).softmax(1)
        return F.kl_div(out.log_softmax(1), goal, reduction="none").sum(1)

    return Task("", net(), {"x": rows(samples, 5)}, run, losses)


@correct("WholeBatch", "Accelerate", "Lightning")
def a_policy_with_given_advantages(draw: random.Random, samples: int) -> Task:
    batch = labelled(rows(samples, 5), 3, weight=rows(samples, 1)[:, 0])

    def losses(out: Tensor, micro: Batch) -> Tensor:
        return classify(out, micro) * micro["weight"]

    return Task("", net(), batch, run, losses)


@correct("WholeBatch", "Accumulator")
def a_gradient_penalty(draw: random.Random, samples: int) -> Task:
    def loss(model: nn.Module, micro: Batch) -> Any:
        x = micro["x"].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return Sum((out.sum(1) + (slope.norm(dim=1) - 1).square()).sum(), len(x))

    return Task("", net(5, 1), {"x": rows(samples, 5)}, run, squared).but(loss=loss)


@correct("WholeBatch")
def two_terms_with_their_own_units(draw: random.Random, samples: int) -> Task:
    made = of_kind("transformer", draw.randint(0, 99))

    def parts(model: nn.Module, micro: Batch) -> tuple[Sum, Sum]:
        out = made.forward(model, micro)
        lm = Sum((tokens(out, micro) * micro["mask"]).sum(), micro["mask"].sum())
        return lm, Sum(out.logsumexp(2).square().mean(1).sum(), len(out))

    def loss(model: nn.Module, micro: Batch) -> Any:
        lm, z = parts(model, micro)
        return wb.Loss.terms({"lm": tuple(lm), "z": (*z, 0.1)})

    def truth(model: nn.Module, batch: Batch) -> Tensor:
        lm, z = parts(model, batch)
        return lm.value / lm.units + 0.1 * z.value / z.units

    count: dict[str, Any] = {"units": lambda b: {"lm": b["mask"].sum(), "z": len(b["mask"])}}
    return made.but(loss=loss, truth=truth, options=count)


# Losses of the whole batch, by the way that there is for them


def whole(encode: Any, loss: Any, made: Task) -> Task:
    def truth(model: nn.Module, batch: Batch) -> Tensor:
        value = loss(encode(model, batch))
        return value.total / value.units

    return made.but(truth=truth, options={"loss": wb.Coupled(encode, loss)})


@correct("WholeBatch")
def info_nce_of_the_whole_batch(draw: random.Random, samples: int) -> Task:
    made = Task("", net(5, 4), {"x": rows(samples, 5), "y": rows(samples, 5)}, run, squared)
    return whole(
        lambda m, b: {"a": m(b["x"]), "b": m(b["y"])},
        lambda z: wb.losses.info_nce(z["a"], z["b"]),
        made,
    )


@correct("WholeBatch")
def supervised_contrast(draw: random.Random, samples: int) -> Task:
    made = classifier(net(), rows(samples, 5), 3)
    return whole(
        lambda m, b: (m(b["x"]), b["y"]), lambda z: wb.losses.supcon_loss(z[0], z[1]), made
    )


@correct("WholeBatch")
def sigmoid_contrast_with_dropout_off(draw: random.Random, samples: int) -> Task:
    made = Task("", net(5, 4), {"x": rows(samples, 5), "y": rows(samples, 5)}, run, squared)
    return whole(
        lambda m, b: (m(b["x"]), m(b["y"])),
        lambda z: wb.losses.siglip_loss(z[0], z[1], scale=2.0),
        made,
    )


@correct("WholeBatch")
def advantages_normalised_over_the_batch(draw: random.Random, samples: int) -> Task:
    def loss(all_of_them: Any) -> wb.Loss:
        losses, reward = all_of_them
        return wb.Loss((losses * (reward - reward.mean()) / reward.std()).sum(), len(losses))

    made = classifier(net(), rows(samples, 5), 3)
    batch = {**made.batch, "reward": rows(samples, 1)[:, 0]}
    return whole(lambda m, b: (classify(m(b["x"]), b), b["reward"]), loss, made.but(batch=batch))
