"""Which samples the test of a loss takes: spread over the batch, in the memory of a micro-batch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.coupled.test_no_false_alarm import CoarseInSixteenBits
from tests.support import EXACT, distance, mlp, samples, sgd
from wholebatch.errors import LossError, SplitError, UnsupportedError

WEIGHT = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
Batch = dict[str, Tensor]


def by_class(rows: int) -> Batch:
    """Return a batch that is sorted by its classes, with as many samples of each."""
    batch = samples(3 * rows)
    return {**batch, "y": torch.arange(3).repeat_interleave(rows)}


def weighted(model: nn.Module, micro: Batch, units: Callable[[Tensor], Any]) -> wb.Loss:
    mean = F.cross_entropy(model(micro["x"]), micro["y"], weight=WEIGHT)
    return wb.mean_loss(mean, units(micro["y"]))


def weights_of(labels: Tensor) -> Tensor:
    return WEIGHT[labels].sum()


REFUSED = "units may count something else|but their units= are|compares samples"


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_micro_batches_of_one_class_each_in_whole_batch(rows: int) -> None:
    model = mlp()
    train = wb.WholeBatch(
        model, sgd(model), loss=lambda m, b: weighted(m, b, len), micro_batch=rows
    )
    with pytest.raises((LossError, UnsupportedError), match=REFUSED):
        train.step(by_class(4))
    right = mlp()
    whole = mlp()
    whole.load_state_dict(right.state_dict())
    train = wb.WholeBatch(
        right, sgd(right), loss=lambda m, b: weighted(m, b, weights_of), micro_batch=rows
    )
    train.step(by_class(4))
    batch = by_class(4)
    F.cross_entropy(whole(batch["x"]), batch["y"], weight=WEIGHT).backward()
    sgd(whole).step()
    assert distance(right.parameters(), whole.parameters()) < EXACT


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.filterwarnings("ignore:micro-batches count the same")
def test_micro_batches_of_one_class_each_in_run(rows: int) -> None:
    def train(units: Callable[[Tensor], Any]) -> nn.Module:
        model = mlp()
        acc = wb.Accumulator(model, sgd(model), steps=3)

        def loss(micro: Batch) -> wb.Loss:
            return weighted(model, micro, units)

        batch = by_class(rows)
        for start in range(0, 3 * rows, rows):
            acc.run(loss, {name: leaf[start : start + rows] for name, leaf in batch.items()})
        return model

    with pytest.raises((LossError, UnsupportedError), match=REFUSED):
        train(len)
    model, whole, batch = train(weights_of), mlp(), by_class(rows)
    F.cross_entropy(whole(batch["x"]), batch["y"], weight=WEIGHT).backward()
    sgd(whole).step()
    assert distance(model.parameters(), whole.parameters()) < EXACT


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5])
def test_no_more_samples_with_a_graph_than_a_micro_batch_has(micro_batch: int) -> None:
    model, most = mlp(), 0

    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        nonlocal most
        if torch.is_grad_enabled():
            most = max(most, len(micro["y"]))
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=micro_batch)
    train.step(samples(16))
    assert most == micro_batch


class _Detached(nn.Module):
    """A language model whose loss divides by a detached statistic of its micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 9, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


def test_gradients_of_single_samples_are_compared_on_fewer_tokens() -> None:
    most = 0

    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        nonlocal most
        tokens = micro["tokens"]
        if torch.is_grad_enabled():
            most = max(most, tokens.numel())
        losses = F.cross_entropy(
            model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none"
        )
        scale = losses.detach().mean()
        return wb.Loss((losses / scale * scale.round(decimals=9)).sum() * 1.0, losses.numel())

    def detached(model: nn.Module, micro: Batch) -> wb.Loss:
        tokens = micro["tokens"]
        logits = model(tokens[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(logits, tokens[:, 1:], reduction="none")
        mean = logits.detach().mean()  # zero in the loss, and not in its gradient
        return wb.Loss(losses.sum() + (logits - logits.detach()).sum() * mean, losses.numel())

    batch = {"tokens": torch.randint(0, 9, (4, 12), generator=torch.Generator().manual_seed(1))}
    model = _Detached()
    wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=1).step(batch)
    assert most == 12
    model = _Detached()
    with pytest.raises(UnsupportedError, match="its gradient is not"):
        wb.WholeBatch(model, sgd(model), loss=detached, micro_batch=1).step(batch)


class _Coarse(_Detached):
    """A model in float32 whose 16-bit gradient is another one for each number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.linear(self.embed(tokens), torch.eye(8))  # in 16 bit under autocast
        logits: Tensor = self.head(CoarseInSixteenBits.apply(hidden))
        return logits


@pytest.mark.parametrize(("micro_batch", "unlabelled", "parts"), [(1, 0, 2), (4, 0, 2), (1, 4, 1)])
def test_numbers_of_32_bits_are_compared_on_half_of_the_micro_batch(
    micro_batch: int, unlabelled: int, parts: int
) -> None:
    """They take twice the memory. All of it is taken only if half of it has no labels."""
    most = {True: 0, False: 0}  # tokens that a graph was made for, by whether autocast was on

    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        tokens, labels = micro["tokens"], micro["labels"]
        if torch.is_grad_enabled():
            in_16_bit = torch.is_autocast_enabled("cpu")
            most[in_16_bit] = max(most[in_16_bit], tokens.numel())
        return wb.cross_entropy(model(tokens).float(), labels)

    tokens = torch.randint(0, 9, (12, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, :unlabelled] = -100
    model = _Coarse()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=micro_batch, precision="bf16")
    train.step({"tokens": tokens, "labels": labels})
    assert most[True] == 12 * micro_batch
    assert most[False] == most[True] // parts


def test_what_ran_out_of_memory_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        if not torch.is_grad_enabled():
            tried.append(len(micro["y"]))
            if len(micro["y"]) > 4:
                raise torch.OutOfMemoryError("tried to allocate")
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    model = mlp()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4)
    with caplog.at_level(logging.WARNING, "wholebatch"):
        for _ in range(16):
            train.step(samples(16))
    assert tried.count(8) == 1
    assert max(tried[1:]) <= 4 < len(tried)
    assert sum("8 samples ran out of memory" in one for one in caplog.messages) == 1


class Box:
    """A micro-batch of a class of one's own."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@dataclass
class Mixed:
    box: Box
    y: Tensor


def of_box(batch: Batch) -> Any:
    return Box(**batch)


def of_pair_in_a_box(batch: Batch) -> Any:
    return Box(pair=(batch["x"], batch["y"]))


def of_mixed(batch: Batch) -> Any:
    return Mixed(Box(x=batch["x"]), batch["y"])


def read(micro: Any) -> tuple[Tensor, Tensor]:
    if isinstance(micro, Mixed):
        return micro.box.x, micro.y
    return micro.pair if hasattr(micro, "pair") else (micro.x, micro.y)


@pytest.mark.parametrize("boxed", [of_box, of_pair_in_a_box, of_mixed])
def test_plain_objects_are_tested_in_run(boxed: Callable[[Batch], Any]) -> None:
    def train(reduction: str) -> None:
        model = mlp()
        acc = wb.Accumulator(model, sgd(model), steps=2)

        def loss(micro: Any) -> wb.Loss:
            x, y = read(micro)
            return wb.Loss(F.cross_entropy(model(x), y, reduction=reduction), len(y))

        for seed in range(2):
            acc.run(loss, boxed(samples(5 + 3 * seed)))
        assert acc.updates == 1

    with pytest.raises(LossError, match="a mean where a sum is expected"):
        train("mean")
    train("sum")


def test_what_cannot_be_taken_apart_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)

    def loss(micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro.nodes[micro.picked]), micro.y)

    for _ in range(2):
        batch = samples(9)
        picked = torch.arange(4)
        acc.run(loss, Box(nodes=batch["x"], picked=picked, y=batch["y"][:4]))
    assert acc.updates == 1
    assert "a Box cannot be taken apart" in caplog.text


def test_a_list_of_tuples_is_a_list_of_samples() -> None:
    def train(reduction: str) -> None:
        model = mlp()
        acc = wb.Accumulator(model, sgd(model), steps=2)

        def loss(micro: list[tuple[Tensor, int]]) -> wb.Loss:
            x, y = torch.stack([x for x, _ in micro]), torch.tensor([y for _, y in micro])
            return wb.Loss(F.cross_entropy(model(x), y, reduction=reduction), len(y))

        for seed in range(2):
            batch = samples(6 + 3 * seed)
            acc.run(loss, list(zip(batch["x"], batch["y"].tolist(), strict=True)))

    with pytest.raises(LossError, match="a mean where a sum is expected"):
        train("mean")
    train("sum")


def test_a_graph_of_nodes_is_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)

    def loss(micro: Batch) -> wb.Loss:
        nodes = model(micro["x"])
        of = torch.zeros(3, 3).double().index_add(0, micro["graph"], nodes[micro["order"]])
        return wb.cross_entropy(of, micro["y"])

    for _ in range(2):
        graph = {"graph": torch.tensor([0, 0, 1, 1, 1, 2, 2]), "order": torch.arange(7).flip(0)}
        acc.run(loss, {"x": samples(7)["x"], **graph, "y": torch.tensor([0, 1, 2])})
    assert acc.updates == 1
    assert "cannot run on a part" in caplog.text
    assert "wb.samples" not in caplog.text


def test_labels_of_graphs_are_counted_beside_rows_that_are_nodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The nodes of three graphs can be cut, and their three labels cannot: nodes are no samples."""
    torch.manual_seed(0)
    model = mlp()
    start = copy.deepcopy(model)
    acc, whole = wb.Accumulator(model, sgd(model), steps=2), sgd(start)
    graphs = [
        {
            "x": samples(sum(sizes))["x"],
            "of": torch.repeat_interleave(torch.tensor(sizes)),
            "y": torch.tensor([0, 1, 2][: len(sizes)]),
        }
        for sizes in ([3, 3, 2], [1, 4])
    ]

    def logits(net: nn.Module, graph: Batch) -> torch.Tensor:
        return torch.zeros(len(graph["y"]), 3).double().index_add(0, graph["of"], net(graph["x"]))

    for graph in graphs:
        acc.run(lambda one: wb.cross_entropy(logits(model, one), one["y"]), graph)
    assert "a number that the batch holds as a whole" in caplog.text
    labels = torch.cat([graph["y"] for graph in graphs])
    F.cross_entropy(torch.cat([logits(start, graph) for graph in graphs]), labels).backward()
    whole.step()
    for ours, right in zip(model.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-14)


def test_a_batch_of_ones_own_class_in_whole_batch() -> None:
    model = mlp()
    train = wb.WholeBatch(
        model, sgd(model), loss=lambda m, b: wb.cross_entropy(m(b.x), b.y), micro_batch=2
    )
    with pytest.raises(SplitError, match="give a dict, a tuple, a named tuple or a dataclass"):
        train.step(Box(**samples(6)))


def test_a_batchnorm_that_run_reaches_and_nobody_gave() -> None:
    model, teacher = mlp(), nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    acc = wb.Accumulator(model, sgd(model), steps=2)

    def loss(micro: Batch) -> wb.Loss:
        with torch.no_grad():
            target = teacher(micro["x"])
        return wb.Loss((model(micro["x"]) - target).square().sum(), len(micro["x"]))

    with pytest.raises(UnsupportedError, match="BatchNorm1d in training mode that is not part"):
        acc.run(loss, samples(8))
    teacher.eval()
    acc.discard()
    for seed in range(2):
        acc.run(loss, samples(8 + 3 * seed))
    assert acc.updates == 1


@pytest.mark.parametrize("dropout", [0.2])
def test_a_recurrent_network_with_dropout_is_tested_in_evaluation_mode(
    dropout: float, caplog: pytest.LogCaptureFixture
) -> None:
    def train(reduction: str) -> None:
        torch.manual_seed(0)
        model = nn.LSTM(5, 3, num_layers=2, dropout=dropout, batch_first=True).double()

        def loss(model: nn.Module, micro: Tensor) -> wb.Loss:
            made = model(micro)[0].square()
            return wb.Loss(made.mean() if reduction == "mean" else made.sum(), micro.numel())

        train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4)
        train.step(torch.randn(16, 4, 5, dtype=torch.float64))

    with pytest.raises(LossError, match="a mean where a sum is expected"):
        train("mean")
    train("sum")
    assert "cannot be given to parts" not in caplog.text


def test_class_weights_with_as_many_rows_as_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(5, 16)

    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        total = F.cross_entropy(model(micro["x"]), micro["y"], micro["weight"], reduction="sum")
        return wb.Loss(total, len(micro["y"]))

    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4)
    with pytest.raises(RuntimeError, match="weight tensor"):
        train.step({**samples(16), "weight": torch.ones(16).double()})
    assert "static=" in caplog.text


def test_counts_among_the_representations_need_no_gradient() -> None:
    """Cox's partial likelihood: the units are a sum of the events, which encode passes on."""

    def encode(model: nn.Module, micro: Batch) -> Batch:
        return {"risk": model(micro["x"])[:, 0], "time": micro["time"], "event": micro["event"]}

    def cox(of: Batch) -> wb.Loss:
        order = of["time"].argsort(descending=True)
        risk = of["risk"][order]
        total = ((risk.logcumsumexp(0) - risk) * of["event"][order]).sum()
        return wb.Loss(total, of["event"].sum())

    model, whole = mlp(), mlp()
    batch = {
        **samples(9),
        "time": torch.rand(9).double(),
        "event": (torch.arange(9) % 3 > 0).double(),
    }
    wb.WholeBatch(model, sgd(model), loss=wb.Coupled(encode, cox), micro_batch=2).step(batch)
    made = cox(encode(whole, batch))
    (made.total / made.units).backward()
    sgd(whole).step()
    assert distance(model.parameters(), whole.parameters()) < EXACT


def test_a_parameter_that_a_loss_freezes_in_the_test_is_trained() -> None:
    """The loss freezes it in its first call, which is the test's: the update is whole."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    truth = copy.deepcopy(model)
    x, y = torch.randn(7, 4).double(), torch.randn(7, 1).double()
    calls = iter(range(100))

    def loss(model: nn.Linear, micro: Any) -> wb.Loss:
        total = F.mse_loss(model(micro[0]), micro[1], reduction="sum")
        if next(calls) == 0:
            model.bias.requires_grad_(False)
        return wb.Loss(total, len(micro[0]))

    train = wb.WholeBatch(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, micro_batch=2)
    train.step((x, y))
    F.mse_loss(truth(x), y).backward()
    assert truth.bias.grad is not None
    torch.testing.assert_close(
        model.bias.detach(), truth.bias.detach() - 0.1 * truth.bias.grad, rtol=0, atol=1e-12
    )
    assert model.bias.requires_grad


def test_a_sum_by_chance_in_one_cut_is_no_sum() -> None:
    """Of 8 samples in 3 and 5 the mean adds up by chance, as that of a comparison may."""
    by_count = {8: 8.0, 5: 5.0, 3: 3.0, 2: 2.9, 1: 1.5}

    def compare(model: nn.Module, micro: Tensor) -> wb.Loss:
        scale = by_count.get(len(micro), float(len(micro)))
        return wb.mean_loss(scale * model(torch.ones(1, 3)).square().sum(), len(micro))

    model = nn.Linear(3, 2)
    train = wb.WholeBatch(model, sgd(model), loss=compare, micro_batch=8)
    with pytest.raises(UnsupportedError, match=r"wb\.Coupled"):
        train.step(torch.randn(16, 3))
