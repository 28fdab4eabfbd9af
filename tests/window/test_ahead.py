"""Steps before the host has read the window: the same update, bit for bit, as after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from tests.support import grouped, loss
from wholebatch.window import close
from wholebatch.window.close import Store


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the CPU step unread, as a CUDA device does; counts how often it was asked to."""
    asked: list[int] = []
    monkeypatch.setattr(close, "_DEVICES_TO_WAIT_FOR", ("cpu", "cuda"))
    real = Store.can_step_unread

    def can(self: Store, hooks: Any) -> bool:
        able = real(self, hooks)
        asked.append(int(able))
        return able

    monkeypatch.setattr(Store, "can_step_unread", can)
    return asked


def make(
    *, fused: bool = True, adam: Callable[..., Any] = torch.optim.AdamW, **options: Any
) -> tuple[nn.Module, wb.WholeBatch]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = adam(model.parameters(), lr=0.01, fused=fused)
    train = wb.WholeBatch(model, optimizer, loss=loss, **grouped({"micro_batch": 4, **options}))
    return model, train


def batch(seed: int, size: int = 11) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (size,), generator=generator)
    labels[::4] = -100
    return {"x": torch.randn(size, 5, generator=generator), "y": labels}


def bits(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def count(micro: dict[str, Tensor]) -> int:
    return int((micro["y"] != -100).sum())


@pytest.mark.parametrize("clip_norm", [None, 0.05, 50.0])
@pytest.mark.parametrize("units", [None, count])
@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_same_bits_as_after_reading(
    here: list[int], clip_norm: float | None, units: Any, adam: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, train = make(clip_norm=clip_norm, units=units, adam=adam)
    steps = [train.step(batch(seed)) for seed in range(4)]
    assert here == [1, 1, 1, 1]
    monkeypatch.undo()
    plain, on_host = make(clip_norm=clip_norm, units=units, adam=adam)
    wanted = [on_host.step(batch(seed)) for seed in range(4)]
    assert all(map(torch.equal, bits(model), bits(plain)))
    for step, other in zip(steps, wanted, strict=True):
        assert (step.update, step.units, step.clip) == (other.update, other.units, other.clip)
        assert step.loss == pytest.approx(other.loss, rel=1e-15)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-15)
    assert here == [1, 1, 1, 1]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fused_sgd_steps_unread_once_its_momentum_is_there(
    here: list[int], momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sgd = partial(torch.optim.SGD, momentum=momentum)
    model, train = make(adam=sgd, nonfinite="skip")
    bad = batch(1)
    bad["x"][5] = math.nan
    first = int(momentum == 0.0)
    assert train.step(bad).skipped is not None
    for seed in range(3):
        train.step(batch(seed))
    before, state = bits(model), [tensor.clone() for tensor in train_state(train)]
    assert train.step(bad).skipped is not None
    assert here == [first, first, 1, 1, 1]
    assert all(map(torch.equal, bits(model), before))
    assert all(map(torch.equal, train_state(train), state))
    monkeypatch.undo()
    plain, on_host = make(adam=sgd)
    for seed in range(3):
        on_host.step(batch(seed))
    assert all(map(torch.equal, bits(model), bits(plain)))


def test_not_where_the_store_steps_bucket_by_bucket(here: list[int]) -> None:
    """Some of the state that a step of all parameters would read is on the host."""
    ours, train = make(units=count, nonfinite="skip", optimizer_state="host")
    plain, other = make(units=count, nonfinite="skip")
    for seed in range(3):
        train.step(batch(seed))
        assert here[::2] == [0] * (seed + 1)
        other.step(batch(seed))
    assert all(map(torch.equal, bits(ours), bits(plain)))
    assert all(map(torch.equal, train_state(train), train_state(other)))


def test_a_window_that_is_not_finite_changes_nothing(here: list[int]) -> None:
    model, train = make()
    train.step(batch(0))
    before = bits(model)
    state = [value.clone() for value in train_state(train)]
    bad = batch(1)
    bad["x"][5] = math.nan
    with pytest.raises(wb.errors.NonFiniteError, match="micro-batch 2 of 3"):
        train.step(bad)
    assert here == [1, 1]
    assert all(map(torch.equal, bits(model), before))
    assert all(map(torch.equal, train_state(train), state))
    assert train.step(batch(2)).update == 2


def train_state(train: wb.WholeBatch) -> list[Tensor]:
    optimizer = train._ledger.target.optimizers[0]
    return [value for state in optimizer.state.values() for value in state.values()]


def test_huge_gradients_are_scaled_after_reading(here: list[int]) -> None:
    """Their norm overflows in fp32, although they are finite."""

    def huge(model: Any, micro: dict[str, Tensor]) -> wb.Loss:
        return wb.Loss(loss(model, micro).total * 1e24, count(micro))

    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    train = wb.WholeBatch(model, optimizer, loss=huge, micro_batch=4, clip_norm=1.0)
    step = train.step(batch(0))
    assert here == [1]
    assert step.skipped is None
    assert 1e22 < step.grad_norm < 1e25


@pytest.mark.parametrize("fused", [True, False])
def test_only_where_the_optimizer_steps_on_the_device(here: list[int], fused: bool) -> None:
    _, train = make(fused=fused)
    train.step(batch(0))
    assert here == [int(fused)]


def test_not_with_hooks_on_the_optimizer(here: list[int]) -> None:
    _, train = make()
    recorded = []
    train._ledger.target.optimizers[0].register_step_pre_hook(lambda *_: recorded.append(1))
    train.step(batch(0))
    assert here == [0]
    assert recorded == [1]


def test_a_loader_is_read_while_the_device_steps(here: list[int]) -> None:
    _, train = make()
    read: list[int] = []

    def loader() -> Any:
        for seed in range(3):
            read.append(seed)
            yield batch(seed)

    recorded = []
    for item in train.over(loader(), ahead=True):
        train.step(item)
        recorded.append(len(read))
    assert recorded == [2, 3, 3]
    assert train.updates == 3


def test_not_where_the_gradient_is_worked_on_or_left(here: list[int]) -> None:
    model, plain = make()
    plain.gradient(batch(0))
    model.zero_grad()
    named: list[str] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=lambda m, b: wb.mean_loss(m(b["x"]).square().mean(), len(b["x"])),
        micro_batch=4,
        close=wb.Close(on_gradient=lambda named_here: named.extend(name for name, _ in named_here)),
    )
    train.step(batch(0))
    assert here == [0]
    assert named


class Kernels(TorchDispatchMode):
    """Counts the operations that a device would run, and those that wait for its result."""

    _FREE = ("view", "detach", "t", "empty_like", "split_with_sizes", "unbind", "expand", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.run = self.read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.read += name == "_local_scalar_dense"
        self.run += name not in self._FREE and func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def test_a_window_costs_the_device_as_much_for_any_number_of_layers(here: list[int]) -> None:
    """The state before a window, its norm, its factor and its step are a few operations each."""
    beside = []
    for layers in (2, 12):
        torch.manual_seed(0)
        norms = (layer for _ in range(layers) for layer in (nn.Linear(5, 5), nn.BatchNorm1d(5)))
        model = nn.Sequential(*norms)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        train = wb.WholeBatch(model, optimizer, loss=loss, execute="eager")
        for seed in range(4):  # Window 4 is a tested one.
            train.step(batch(seed))
        with Kernels() as ours:
            train.step(batch(5))
        assert ours.read == 0
        with Kernels() as plain:
            loss(model, batch(5)).total.backward()
            optimizer.step()
        beside.append(ours.run - plain.run)
    assert beside[0] == beside[1] < 60
    assert here[-1] == 1
