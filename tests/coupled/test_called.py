"""Models in a loop of the user's own: what couples their samples and what their forwards move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.support import grouped, mlp, pieces, samples, sgd
from wholebatch.errors import UnsupportedError


class Wrapped(nn.Module):
    """A layer of 6 features between two linear ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.last = nn.Linear(5, 6), layer, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.layer(self.first(x)))
        return result


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class BatchDeviation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.std(0).mean()


def backward(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> wb.Accumulator:
    acc = wb.Accumulator(model, sgd(model), **grouped({"steps": 3, **options}))
    total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    acc.backward(total, units=len(batch["y"]))
    return acc


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: Any = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        self.last = x
        return x


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return x + self.table


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


class Constant(nn.Module):
    """A buffer that the graph of the user's forward keeps for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


APART: dict[str, Callable[[], nn.Module]] = {
    "linear": nn.Identity,
    "dropout": lambda: nn.Dropout(0.3),
    "layer norm": lambda: nn.LayerNorm(6),
    "noise": Noise,
    "counter": Counter,
    "cache": Cache,
    "checkpoint": Checkpointed,
    "constant": Constant,
    "frozen batchnorm": lambda: nn.BatchNorm1d(6).eval(),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("rows", [2, 8])
def test_no_false_alarm(name: str, rows: int) -> None:
    model = Wrapped(APART[name]()).double()
    acc = backward(model, samples(rows))
    acc.flush()
    assert acc.updates == 1


@pytest.mark.parametrize("policy", ["allow", "freeze"])
def test_a_batchnorm_with_a_policy_is_no_finding(policy: str) -> None:
    looked, plain = (Wrapped(nn.BatchNorm1d(6)).double() for _ in range(2))
    for model, audit in ((looked, True), (plain, False)):
        acc = wb.Accumulator(model, sgd(model), steps=2, batchnorm=policy, audit=audit)
        for micro in pieces(samples(9), [5, 4]):
            total = F.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")
            acc.backward(total, units=len(micro["y"]))
    for ours, theirs in zip(looked.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shared", [False, True])
def test_a_reused_batchnorm_is_counted_as_without_the_look(shared: bool) -> None:
    looked, plain = (Wrapped(nn.BatchNorm1d(6)).double() for _ in range(2))
    for model, audit in ((looked, True), (plain, False)):
        acc = wb.Accumulator(model, sgd(model), steps=2, batchnorm="allow", audit=audit)
        for micro in pieces(samples(9), [5, 4]):
            both = model(micro["x"]).square().sum() + model(micro["x"] * 2).square().sum()
            part = model.layer(micro["x"] @ torch.ones(5, 6).double()).square().sum()
            acc.backward(both + part if shared else both, units=len(micro["y"]))
    for ours, theirs in zip(looked.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_a_recurrent_network_with_time_first(rows: int) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(5, 4, num_layers=2, bidirectional=True)
            self.out = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            states, (h, c) = self.rnn(x)
            return self.out(states), (h, c)

    model = Recurrent().double()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    logits, _ = model(torch.randn(7, rows, 5).double())
    labels = torch.zeros(7 * rows).long()
    total = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    acc.backward(total, units=7 * rows)
    acc.flush()


def test_a_recurrent_layer_by_itself() -> None:
    model = nn.LSTM(5, 4, num_layers=2, batch_first=True).double()
    for rows in (2, 4):
        acc = wb.Accumulator(model, sgd(model), steps=3)
        states, _ = model(torch.randn(rows, 7, 5).double())
        acc.backward(states.square().sum(), units=rows)
        acc.flush()


def test_a_transformer_with_time_first() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1).double()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    acc.backward(model(torch.randn(6, 3, 4).double()).square().sum(), units=3)
    acc.flush()


class Rows(nn.Module):
    """A transformer layer with time first, over batches whose first dimension is the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        return self.out(hidden.mean(1) if x.dim() == 3 else hidden)


class Codebook(nn.Module):
    """Centres its samples; the codebook and the temperature are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor, codes: Tensor, temperature: Tensor) -> Tensor:
        return self.out(x - x.mean(0)) / temperature + (x @ codes.T).sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "given", "why"),
    [
        (Rows, [torch.ones(3, 4)], "its layer encoder.self_attn has batch_first=False"),
        (Rows, [torch.ones(3, 6, 4)], "its layer encoder.self_attn has batch_first=False"),
        (Codebook, [torch.ones(4, 4), torch.ones(7, 4), torch.tensor(2.0)], "different numbers"),
    ],
)
def test_what_may_be_no_dimension_of_samples_is_warned_of(
    model: Any, given: list[Tensor], why: str
) -> None:
    net, x = model().double(), torch.randn(given[0].shape).double()
    acc = wb.Accumulator(net, sgd(net), steps=3)
    output = net(x, *(one.double() for one in given[1:]))
    with pytest.warns(UserWarning, match=f"{model.__name__}: its output for one row.*{why}"):
        acc.backward(output.square().sum(), units=3)
    acc.discard()


def test_a_graph_is_no_batch_of_nodes() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(5, 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.lin(x) + torch.zeros(len(x), 3).double().index_add(
                0, edges[1], self.lin(x)[edges[0]]
            )

    model = Graph().double()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    z = model(torch.randn(9, 5).double(), torch.randint(0, 9, (2, 20)))
    acc.backward(F.cross_entropy(z, torch.zeros(9).long(), reduction="sum"), units=9)
    acc.flush()


def test_a_set_is_one_unit() -> None:
    model = Wrapped(BatchDeviation()).double()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    acc.backward(model(samples(8)["x"]).square().sum(), units=1)
    assert acc.micro_batches == 1


def test_the_first_micro_batch_of_one_sample_tells_nothing() -> None:
    model = Wrapped(BatchDeviation()).double()
    model.layer.forward = lambda x: x + x.mean(0)  # type: ignore[method-assign]
    acc = wb.Accumulator(model, sgd(model), steps=3)
    acc.backward(model(samples(1)["x"]).square().sum(), units=1)
    with pytest.raises(UnsupportedError, match="layer"):
        acc.backward(model(samples(4)["x"]).square().sum(), units=4)


def test_models_that_feed_each_other_are_looked_at_each() -> None:
    encoder, head = mlp(5, 4), nn.Sequential(Functional(), nn.Linear(4, 3)).double()
    parameters = [*encoder.parameters(), *head.parameters()]
    acc = wb.Accumulator([encoder, head], torch.optim.SGD(parameters, lr=0.1), steps=2)
    batch = samples(6)
    total = F.cross_entropy(head(encoder(batch["x"])), batch["y"], reduction="sum")
    with pytest.raises(UnsupportedError, match=r"0 \(Functional\)"):
        acc.backward(total, units=6)


@pytest.mark.parametrize("name", ["dropout", "noise", "counter", "checkpoint"])
def test_the_look_leaves_no_trace(name: str) -> None:
    made = []
    for audit in (True, False):
        torch.manual_seed(3)
        model = Wrapped(APART[name]())
        acc = wb.Accumulator(model, sgd(model), steps=2, audit=audit)
        torch.manual_seed(4)
        for micro in pieces(samples(8, dtype=torch.float32), [5, 3]):
            total = F.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")
            acc.backward(total, units=len(micro["y"]))
        made.append((model, torch.rand(3)))
    (looked, drawn), (plain, as_drawn) = made
    assert all(parameter._backward_hooks is None for parameter in looked.parameters())
    assert torch.equal(drawn, as_drawn)
    assert getattr(looked.layer, "seen", 0) == getattr(plain.layer, "seen", 0)
    for ours, theirs in zip(looked.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_autocast_is_that_of_the_user() -> None:
    model = Wrapped(nn.LayerNorm(6))
    acc = wb.Accumulator(model, sgd(model), steps=2)
    batch = samples(6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    acc.backward(total, units=6)
    acc.flush()


def test_a_compiled_model_is_left_as_it_is() -> None:
    model = torch.compile(Wrapped(nn.LayerNorm(6)).double(), backend="eager")
    acc = wb.Accumulator(model, sgd(model), steps=2)
    for micro in pieces(samples(12), [6, 6]):
        total = F.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")
        acc.backward(total, units=6)
    assert acc.updates == 1
