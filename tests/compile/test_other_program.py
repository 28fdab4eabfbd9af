"""Programs whose graph could be another program than eager code: equal to it, or run eagerly.

Each row changes something between windows, or asks for something that only eager code has: other
memory behind a weight, attributes of parameters, what an input requires, functions of torch that
are replaced, code that asks if it is compiled, operations that Dynamo does not look into.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.compile.nets import mode_of, traced
from tests.support import samples, sgd
from wholebatch.compile import ExecuteWarning

Micro = dict[str, Tensor]
Change = Callable[[Any, int], None]
Make = Callable[[], nn.Module]


class Row(NamedTuple):
    """A program: its model, its loss per sample, what changes before window i, and how it ends."""

    make: Make
    loss: Callable[[Any, Micro], Tensor]
    change: Change = lambda model, window: None
    ends: str = "operations"
    batch: Callable[[int], Micro] = lambda window: samples(8)


class Pair(nn.Module):
    """A trained layer and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(5, 3), nn.Linear(5, 3).requires_grad_(False)
        self.constant = torch.zeros(3, dtype=torch.float64)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.q(x) - self.k(x) + self.constant
        return logits


class Follows(Pair):
    """The frozen layer follows the trained one in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.k.weight.lerp_(self.q.weight, 0.2)
        return super().forward(x)


class Decays(Pair):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.q.weight.mul_(0.9)
        return super().forward(x)


class Merges(Pair):
    """Low-rank products that are merged into a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 5, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.t() @ self.b.t()


def entropy(model: Any, micro: Micro) -> Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")


def before(number: int, change: Callable[[Any], None]) -> Change:
    return lambda model, window: change(model) if window == number else None


def merge(model: Any, window: int) -> None:
    if window in (2, 4):
        model.k.weight.data = model.k.weight.data - model.b.data @ model.a.data
        model.b.data.zero_()


def regularised(model: Any, micro: Micro) -> Tensor:
    kept = [p for p in model.parameters() if not getattr(p, "no_decay", False)]
    return entropy(model, micro) + 0.1 * sum(p.square().sum() for p in kept)


def with_attributes(dropout: float = 0.0) -> nn.Module:
    model = nn.Sequential(Pair(), nn.Dropout(dropout))
    for name, parameter in model.named_parameters():
        parameter.no_decay = name.endswith("bias")  # type: ignore[attr-defined]
    return model


def toggled(model: Any, window: int) -> None:
    model[0].q.bias.no_decay = window < 3


SETTINGS: dict[str, Any] = {}


def asks_if_compiled(model: Any, micro: Micro) -> Tensor:
    weight = 1.0 if torch.compiler.is_compiling() else SETTINGS.get("weight", 2.0)
    return weight * entropy(model, micro)


@torch.library.custom_op("wholebatch_tests::scaled_backward", mutates_args=())
def scaled_backward(x: Tensor) -> Tensor:
    return x.clone()


@scaled_backward.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


scaled_backward.register_autograd(lambda ctx, gradient: gradient * SETTINGS.get("weight", 1.0))


@torch.compiler.allow_in_graph
def hidden_penalty(x: Tensor) -> Tensor:
    return SETTINGS.get("weight", 1.0) * x.square().sum(-1)


def by_strides(model: Any, micro: Micro) -> Tensor:
    return (1.0 if micro["x"].is_contiguous() else 2.0) * entropy(model, micro)


def sliced(window: int) -> Micro:
    batch = samples(8)
    if window % 2:
        batch["x"] = torch.cat([batch["x"], batch["x"]], 1)[:, ::2]
    return batch


def by_gradient(model: Any, micro: Micro) -> Tensor:
    return (3.0 if micro["x"].requires_grad else 1.0) * entropy(model, micro)


def requiring(window: int) -> Micro:
    batch = samples(8)
    batch["x"].requires_grad_(window % 2 == 1)
    return batch


def halves_the_batch(model: Any, micro: Micro) -> Tensor:
    micro["x"].div_(2.0)
    return entropy(model, micro)


def put_on(owner: Any, name: str, value: Any) -> Callable[[Any], None]:
    return lambda _: setattr(owner, name, value)


LINEAR, RELU = nn.Linear.forward, functional.relu


def activated(model: Any, micro: Micro) -> Tensor:
    logits = functional.relu(model(micro["x"]))
    return functional.cross_entropy(logits, micro["y"], reduction="none")


TWO = torch.full((3,), 2.0, dtype=torch.float64)
ROWS: dict[str, Row] = {
    "other memory of a frozen weight": Row(
        Pair, entropy, before(2, lambda m: setattr(m.k.bias, "data", TWO.clone()))
    ),
    "other memory of a tensor that is no parameter": Row(
        Pair, entropy, before(2, lambda m: setattr(m.constant, "data", TWO.clone()))
    ),
    "other memory of a trained weight": Row(
        Pair, entropy, before(2, lambda m: setattr(m.q.bias, "data", TWO.clone()))
    ),
    "a frozen part in another dtype and back": Row(
        Pair, entropy, before(2, lambda m: m.k.float().double().bias.data.fill_(2.0))
    ),
    "merged low-rank products": Row(Merges, entropy, merge),
    "a forward that moves a frozen weight": Row(Follows, entropy, ends="eager"),
    "a forward that moves a trained weight": Row(Decays, entropy, ends="eager"),
    "attributes of parameters that change": Row(with_attributes, regularised, toggled),
    "attributes of parameters, with dropout": Row(lambda: with_attributes(0.5), regularised),
    "code that asks if it is compiled": Row(
        Pair, asks_if_compiled, before(3, lambda _: SETTINGS.update(weight=3.0))
    ),
    "the backward of a custom operation": Row(
        Pair,
        lambda model, micro: entropy(lambda x: model(scaled_backward(x)), micro),
        before(3, lambda _: SETTINGS.update(weight=0.5)),
        ends="eager",
    ),
    "a function that Dynamo skips": Row(
        Pair,
        lambda model, micro: entropy(model, micro) + hidden_penalty(model(micro["x"])),
        before(3, lambda _: SETTINGS.update(weight=0.5)),
        ends="eager",
    ),
    "inputs with gaps": Row(Pair, by_strides, batch=sliced),
    "inputs that require gradients": Row(Pair, by_gradient, batch=requiring, ends="eager"),
    "a loss that changes the batch": Row(Pair, halves_the_batch, ends="eager"),
    "a function of torch that is replaced": Row(
        Pair, activated, before(3, put_on(functional, "relu", torch.sin))
    ),
    "a method of torch that is replaced": Row(
        Pair, entropy, before(3, put_on(nn.Linear, "forward", lambda s, x: 2 * LINEAR(s, x)))
    ),
}


def losses_of(row: Row, execute: str) -> tuple[list[float], list[Tensor], str]:
    SETTINGS.clear()
    model = row.make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    found = []
    torch.manual_seed(1)
    train = traced(model, optimizer, loss=row.loss, execute=execute, audit=False, micro_batch=8)
    try:
        for window in range(6):
            row.change(model, window)
            found.append(float(train.step(row.batch(window)).loss))
    finally:
        functional.relu, nn.Linear.forward = RELU, LINEAR  # type: ignore[method-assign]
    return found, [parameter.detach().clone() for parameter in model.parameters()], mode_of(train)


@pytest.mark.parametrize("name", ROWS)
def test_a_graph_is_the_program_of_eager_code(name: str) -> None:
    row = ROWS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExecuteWarning)
        losses, weights, _ = losses_of(row, "eager")
        found, ours, mode = losses_of(row, "compile")
    assert found == pytest.approx(losses, rel=1e-12)
    for weight, other in zip(ours, weights, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-12, atol=1e-15)
    assert mode == row.ends


def test_two_executors_may_capture_at_once() -> None:
    models, modes = [Pair(), Pair()], []

    def train(model: nn.Module) -> None:
        run = traced(model, sgd(model.q), loss=entropy, audit=False)  # type: ignore[arg-type]
        for _ in range(3):
            run.step(samples(8))
        modes.append(mode_of(run))

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert modes == ["operations"] * 2
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_trainer_that_is_gone_leaves_no_model_behind() -> None:
    """Dynamo keeps every backend that it was ever given."""
    model = Pair()
    run = traced(model, sgd(model.q), loss=entropy, audit=False)  # type: ignore[arg-type]
    for _ in range(3):
        run.step(samples(8))
    assert mode_of(run) == "operations"
    weight = weakref.ref(model.q.weight)
    del run, model
    gc.collect()
    assert weight() is None
