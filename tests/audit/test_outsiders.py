"""Loops that people wrote: right ones are exact and not refused, wrong ones are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.errors import UnsupportedError


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.ModuleDict({"body": nn.Linear(4, 5), "head": nn.Linear(5, 3)}).double()


def logits(model: Any, x: Tensor) -> Tensor:
    made: Tensor = model["head"](model["body"](x).tanh())
    return made


def samples(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in sizes]


def off(
    backward: Callable[[Any, Any, Any], Any], mean: Tensor, model: nn.Module, data: Any
) -> float:
    """Return how far a loop's gradient is from that of the undivided `mean`."""
    parameters = list(model.parameters())
    right = torch.cat([g.flatten() for g in torch.autograd.grad(mean, parameters)])
    acc = wb.Accumulator(model, None, steps=len(data))
    for micro in acc.over(data):
        backward(acc, model, micro)
    made = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    return float((made - right).norm() / right.norm())


Bags = tuple[Tensor, tuple[int, ...], Tensor]


def bag_loss(model: nn.Module, bags: Bags) -> Tensor:
    x, sizes, y = bags
    pooled = [part.mean(0) for part in logits(model, x).split(list(sizes))]
    return F.cross_entropy(torch.stack(pooled), y)


def bags(*sizes: int) -> Bags:
    return torch.randn(sum(sizes), 4).double(), sizes, torch.randint(3, (len(sizes),))


@pytest.mark.parametrize("sizes", [((3, 1, 4), (2, 5)), ((2,) * 9, (1, 6))])
def test_bags_of_unequal_sizes_are_no_comparison(sizes: Any) -> None:
    torch.manual_seed(3)
    data, model = [bags(*one) for one in sizes], net()
    whole = torch.cat([b[0] for b in data]), sum(sizes, ()), torch.cat([b[2] for b in data])

    def backward(acc: Any, model: nn.Module, micro: Bags) -> None:
        acc.backward(mean=bag_loss(model, micro), units=len(micro[1]))

    assert off(backward, bag_loss(model, whole), model, data) < 1e-14


def test_a_call_for_each_task_is_right() -> None:
    """The queries of a task of a meta-learner are linked, those of two tasks are not."""
    model = nn.Linear(4, 1).double()
    tasks = [torch.randn(5, 5, 4).double() for _ in range(2)]

    def loss(tasks: Tensor) -> Tensor:
        losses = []
        for x in tasks:
            weights = dict(model.named_parameters())
            inner = torch.func.functional_call(model, weights, (x[:3],)).square().mean()
            slopes = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
            moved = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
            query = torch.func.functional_call(model, moved, (x[3:],))
            losses.append((query - x[3:, :1]).square().mean())
        return torch.stack(losses).mean()

    def backward(acc: Any, model: nn.Module, tasks: Tensor) -> None:
        acc.backward(mean=loss(tasks), units=len(tasks))

    assert off(backward, loss(torch.cat(tasks)), model, tasks) < 1e-12


def test_attention_over_each_bag_is_right() -> None:
    """One model is called once for all bags, the other for each."""
    torch.manual_seed(5)
    body, weigh = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
    data = [bags(3, 5), bags(2, 4, 1)]

    def loss(micro: Bags) -> Tensor:
        x, sizes, y = micro
        parts = body(x).tanh().split(list(sizes))
        pooled = [(weigh(part).softmax(0) * part).sum(0) for part in parts]
        return F.cross_entropy(torch.stack(pooled), y, reduction="sum")

    acc = wb.Accumulator([body, weigh], None, steps=2)
    for micro in acc.over(data):
        acc.backward(loss(micro), units=len(micro[1]))
    right = torch.autograd.grad(sum(map(loss, data)) / 5, [body.weight, weigh.weight])
    for p, gradient in zip((body.weight, weigh.weight), right, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-12, atol=1e-14)


def test_rows_as_units_of_bags_are_told() -> None:
    torch.manual_seed(3)
    acc, micro = wb.Accumulator(model := net(), None, steps=2), bags(3, 1, 4)
    with pytest.warns(UserWarning, match="this loss links 4 of the 8 rows"):
        acc.backward(mean=bag_loss(model, micro), units=8)
    acc.discard()


def test_a_checkpoint_around_head_and_loss() -> None:
    """The test of a first call inside a checkpoint adds nothing to what the checkpoint saves."""
    data, model = samples(4, 4, 3), net()
    x, y = map(torch.cat, zip(*data, strict=True))

    def summed(hidden: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model["head"](hidden), y, reduction="sum")  # type: ignore[index]

    def backward(acc: Any, model: Any, micro: Any) -> None:
        hidden = model["body"](micro[0]).tanh()
        acc.backward(checkpoint(summed, hidden, micro[1], use_reentrant=False), units=len(micro[1]))

    assert off(backward, F.cross_entropy(logits(model, x), y), model, data) < 1e-14


@pytest.mark.parametrize("inside", ["all", "body"])  # the head outside of it gets a gradient
def test_a_reentrant_checkpoint_is_named(inside: str) -> None:
    acc, [(x, y)] = wb.Accumulator(model := net(), None, steps=2), samples(4)
    x.requires_grad_()
    if inside == "all":
        made = checkpoint(lambda x: logits(model, x), x, use_reentrant=True)
    else:
        hidden = checkpoint(model["body"], x, use_reentrant=True)  # type: ignore[index]
        made = model["head"](hidden)  # type: ignore[index]
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        acc.backward(mean=F.cross_entropy(made, y), units=4)
    acc.discard()


class OfGraphs(nn.Module):
    """One logit for each node, from its neighbours: `edges` are two rows of node numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sent = self.message(x)[edges[0]]
        return self.out(torch.zeros_like(x).index_add(0, edges[1], sent) + x)


@pytest.mark.parametrize("way", ["backward", "run"])
def test_a_graph_of_two_nodes_is_no_batch_of_two_samples(way: str) -> None:
    """Its edges have two rows, too."""
    model = OfGraphs().double()
    torch.manual_seed(2)
    edges = torch.tensor([[0, 1, 1], [1, 0, 1]])
    data = [(torch.randn(2, 4).double(), edges, torch.randint(3, (2,))) for _ in range(2)]

    def backward(acc: Any, model: Any, micro: Any) -> None:
        def loss(micro: Any) -> Any:
            x, edges, y = micro
            return wb.mean_loss(F.cross_entropy(model(x, edges), y), len(y))

        acc.run(loss, micro) if way == "run" else acc.backward(loss(micro))

    mean = torch.stack([F.cross_entropy(model(x, edges), y) for x, edges, y in data]).mean()
    assert off(backward, mean, model, data) < 1e-12


@pytest.mark.parametrize("beyond", [True, False])
def test_targets_beyond_the_mask_are_trained(beyond: bool) -> None:
    """From the second window on, in which no test compares the padded with the trimmed."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)).double()
    widths = []

    def loss(model: Any, micro: dict[str, Tensor]) -> wb.Loss:
        if torch.is_grad_enabled():  # the test of the loss has no graph here
            widths.append(micro["targets"].shape[1])
        return wb.cross_entropy(model(micro["input_ids"]), micro["targets"], dim=-1)

    def batch(seed: int, beyond: bool) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        ids = torch.randint(1, 9, (4, 6))
        mask = torch.ones_like(ids)
        mask[:, 4:], mask[2, 2:] = 0, 0
        targets = ids.roll(-1, 1) if beyond else ids.roll(-1, 1).masked_fill(mask == 0, -100)
        return {"input_ids": ids * mask, "attention_mask": mask, "targets": targets}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = wb.tokens(12)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=tokens, execute="eager")
    train.step(batch(1, False))
    widths.clear()
    given = batch(2, beyond)
    step, trained = train.step(given), [*widths]
    assert step.units == loss(model, given).units
    assert max(trained[-2:]) == (6 if beyond else 4)
