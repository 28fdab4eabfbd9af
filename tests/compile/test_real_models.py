"""What the code of real models does, and a trace must bear: each as one graph, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.compile.nets import loss, mode_of, steps_of, traced
from tests.support import EXACT, Whole, distance, mlp, samples, sgd
from wholebatch.compile import ExecuteWarning
from wholebatch.compile.constant_values import draws
from wholebatch.compile.graph_inputs import take_apart
from wholebatch.compile.guards import GuardSet
from wholebatch.compile.host_constants import lift_host_constants


class Wrapped(nn.Module):
    """An MLP whose forward does something more."""

    def __init__(self, more: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = mlp()
        self.more = more
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.more(self, x))
        return out


def drops_layers(model: Any, x: Tensor) -> Tensor:
    if torch.rand([]) < model.rate:
        return x
    return 2 * x


def asserts(_: Any, x: Tensor) -> Tensor:
    torch._check_tensor_all(x < 100.0, lambda: "too large")
    return 2 * x


def has_a_distribution(_: Any, x: Tensor) -> Tensor:
    return torch.distributions.Normal(x, x.square() + 1).log_prob(2 * x)


def hooked(function: Callable[..., Any]) -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(function)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Wrapped(drops_layers),
        lambda: Wrapped(asserts),
        lambda: Wrapped(has_a_distribution),
    ],
)
def test_is_one_graph_with_the_update_of_the_undivided_batch(make: Any) -> None:
    model = make()
    whole = Whole(model)
    eager_model = copy.deepcopy(model)
    eager = wb.WholeBatch(
        eager_model, sgd(eager_model), loss=wb_loss, micro_batch=4, execute="eager"
    )
    train = traced(model)
    for number in (10, 10, 11, 10):
        train.step(samples(number))
        eager.step(samples(number))
        whole.step(samples(number))
    assert mode_of(train) == "operations"
    steps = steps_of(train).values()
    assert [step.joint.random for step in steps] == [False] * len(steps)  # So they were checked.
    whole.assert_same(model)
    assert distance(model.parameters(), eager_model.parameters()) <= EXACT


def wb_loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


# --------------------------------------------- values that may differ next time


def decides_by_data(_: Any, x: Tensor) -> Tensor:
    return 2 * x if (x < 100.0).all() else x


def decides_by_a_weight(model: Any, x: Tensor) -> Tensor:
    return 2 * x if model.inner[0].weight.sum() < 100.0 else x


def casts(model: Any, x: Tensor) -> Tensor:
    model.inner.to(torch.float32)
    model.inner.to(torch.float64)
    return x


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Wrapped(decides_by_data), r"test_real_models.py, line \d+: return 2 \* x if \(x"),
        (lambda: Wrapped(decides_by_a_weight), "line .* if model.inner"),
        (lambda: hooked(lambda *_: None), "0 has forward hooks"),
    ],
)
def test_a_value_that_may_differ_next_time_is_refused(make: Any, reason: str) -> None:
    train = traced(make())
    with pytest.warns(ExecuteWarning, match=reason):
        train.step(samples(10))
    train.step(samples(10))
    assert mode_of(train) == "eager"


def test_a_forward_that_casts_its_model_is_not_traced() -> None:
    train = traced(Wrapped(casts))
    with pytest.warns(ExecuteWarning, match="its forward casts or moves a Sequential"):
        train.step(samples(10))
    assert mode_of(train) == "eager"


def test_an_assertion_that_fails_later_is_an_error() -> None:
    model = Wrapped(asserts)
    train = traced(model, audit=False)
    for _ in range(3):
        train.step(samples(8))
    assert mode_of(train) == "operations"
    batch = samples(8)
    batch["x"][5, 0] = 1000.0
    with pytest.raises(RuntimeError, match="an assertion of the model's code failed"):
        train.step(batch)


# ------------------------------------------------------ checkpoints with dropout


class Checkpointed(nn.Module):
    """Dropout of each kind in parts that are run again in the backward."""

    def __init__(self, *, on: bool, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.read = nn.Linear(8, 3)
        self.on = on
        self.options = options

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = functional.dropout(torch.tanh(layer(x)), 0.3, self.training)
        kept = x.new_empty(len(x), 1).bernoulli_(0.8)
        kept.div_(0.8)  # Drawn in place, and changed after it.
        return x * kept + torch.rand_like(x).add_(1.0) * x

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.parts:
            if self.on:
                x = checkpoint(self.part, layer, x, use_reentrant=False, **self.options)
            else:
                x = self.part(layer, x)
        logits: Tensor = self.read(x)
        return logits


def test_a_checkpoint_with_dropout_uses_the_numbers_of_its_forward() -> None:
    """The same numbers are drawn in the same order, so the gradient is that without checkpoints."""
    found = []
    for on, execute in ((True, "compile"), (False, "eager"), (True, "eager")):
        model = Checkpointed(on=on).double()
        if execute == "compile":
            train = traced(model, audit=False)
        else:
            train = wb.WholeBatch(
                model, sgd(model), loss=wb_loss, micro_batch=4, execute="eager", audit=False
            )
        for step in range(4):
            torch.manual_seed(step)
            train.step(samples(8, features=8))
        found.append([parameter.detach().clone() for parameter in model.parameters()])
        if execute == "compile":
            assert mode_of(train) == "operations"
            assert all(step.joint.random for step in steps_of(train).values())
    assert distance(found[2], found[1]) <= EXACT
    assert distance(found[0], found[1]) <= EXACT


# ------------------------------------------------------------- recurrent layers


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop = nn.Dropout(0.5 if options.get("dropout") else 0.0)
        self.recur = kind(5, 6, num_layers=2, batch_first=True, **options)
        self.read = nn.Linear(12 if options.get("bidirectional") else 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.recur(torch.stack([x, 2 * x, -x], 1))[0]
        logits: Tensor = self.read(self.drop(outputs[:, -1]))
        return logits


@pytest.mark.parametrize("kind", [nn.LSTM])
def test_recurrent_layers_run_eagerly(kind: Any) -> None:
    model = Recurrent(kind).double()
    whole = Whole(model)
    train = traced(model)
    with pytest.warns(ExecuteWarning, match=f"recur is an nn.{kind.__name__}, which runs eagerly"):
        train.step(samples(10))
    train.step(samples(10))
    for _ in range(2):
        whole.step(samples(10))
    assert mode_of(train) == "eager"
    whole.assert_same(model)


# ------------------------------------------------------------- grouped products


class Experts(nn.Module):
    """Two experts; the first half of the samples goes to the one, the rest to the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.read = nn.Linear(5, 16), nn.Linear(16, 3)
        self.experts = nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32, device=x.device)
        hidden = self.into(x).to(self.experts.dtype)
        if x.dtype is torch.float64:  # torch has no grouped product in float64
            first, second = hidden.split([len(x) // 2, len(x) - len(x) // 2])
            return self.read(torch.cat([first @ self.experts[0], second @ self.experts[1]]))
        return self.read(functional.grouped_mm(hidden, self.experts, offs=ends))


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="needs torch 2.10")
def test_grouped_products_follow_autocast_in_a_graph() -> None:
    gradients = {}
    for name, dtype in (("exact", torch.float64), ("eager", torch.float32), ("graph", None)):
        model = Experts().to(dtype or torch.float32)
        make = traced if name == "graph" else wb.WholeBatch
        options: dict[str, Any] = {} if name == "graph" else {"loss": loss, "execute": "eager"}
        precision = "full" if name == "exact" else "bf16"
        train = make(model, sgd(model), micro_batch=4, precision=precision, audit=False, **options)
        for _ in range(2):
            model.zero_grad()
            train.gradient(samples(8, dtype=dtype or torch.float32))
        gradients[name] = [p.grad for p in model.parameters()]
    assert mode_of(train) == "operations"
    wanted = gradients["exact"]
    assert distance(gradients["graph"], wanted) <= 1.25 * distance(gradients["eager"], wanted)


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="needs torch 2.10")
def test_grouped_products_in_float32_are_not_traced() -> None:
    train = traced(Experts(), audit=False)
    with pytest.warns(ExecuteWarning, match="its experts multiply groups of tokens in float32"):
        train.step(samples(8, dtype=torch.float32))


# -------------------------------------------------------------------- operations


class Forecast(nn.Module):
    """Its loss has a gradient whose strides torch predicts wrongly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x).transpose(1, 2)  # type: ignore[no-any-return]


def test_strides_that_torch_predicts_wrongly() -> None:
    def squares(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        error = functional.mse_loss(model(micro["x"]), micro["y"])
        return wb.mean_loss(error, micro["y"].numel())

    def batch(number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        shapes = {"x": (number, 3, 4), "y": (number, 6, 3)}
        return {
            name: torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in shapes.items()
        }

    def mean_square(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(model(micro["x"]), micro["y"])

    model = Forecast().double()
    whole = Whole(model, loss=mean_square)
    train = traced(model, loss=squares)
    for _ in range(3):
        train.step(batch(10))
        whole.step(batch(10))
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def test_a_graph_that_fails_when_it_runs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholebatch.compile import joint_graph

    def fails(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(joint_graph.JointStep, "__call__", fails)
    model = mlp()
    whole = Whole(model)
    train = traced(model)
    with pytest.warns(ExecuteWarning, match="it fails as a graph .RuntimeError: no such kernel"):
        train.step(samples(10))
    train.step(samples(10))
    for _ in range(2):
        whole.step(samples(10))
    whole.assert_same(model)


# ---------------------------------------------------------------- host constants


def test_host_constants_are_computed_once() -> None:
    table = torch.arange(32.0, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        scale = torch.tensor([2.0], dtype=torch.float64).sqrt()
        return x * scale + (torch.arange(32) % 5) * table + torch.rand(32).double() * 0

    x = torch.randn(32, dtype=torch.float64)
    module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    lift_host_constants(module, torch.device("cpu"))
    targets = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert not any("arange" in name or "sqrt" in name or "remainder" in name for name in targets)
    assert any("rand" in name for name in targets)  # What is drawn stays.
    assert distance([module(x)], [function(x)]) <= EXACT
    model = mlp()
    guards = GuardSet(lambda model, x: model(x).sum(-1), model, take_apart(samples(4)["x"]))
    guards.watch([table])
    assert guards.hold(model, samples(4)["x"])
    table.add_(1.0)
    assert guards.broken_by(model, samples(4)["x"]) == "a tensor"
    guards.accept_tensors()
    assert guards.hold(model, samples(4)["x"])
    table.data = torch.zeros(32, dtype=torch.float64)
    assert guards.broken_by(model, samples(4)["x"]) == "a tensor"


def test_backwards_of_attention_have_the_seed_of_their_forward() -> None:
    aten = torch.ops.aten
    for name in ("efficient", "cudnn", "flash"):
        forward = getattr(aten, f"_scaled_dot_product_{name}_attention").default
        backward = getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default
        assert draws(forward, (), {"dropout_p": 0.1})
        assert not draws(forward, (), {"dropout_p": 0.0})
        assert not draws(backward, (), {"dropout_p": 0.1})
