"""Optimizer state on the host: the bits of the plain window, for any per-parameter optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.offload.seen import watching
from tests.support import (
    EXACT,
    Whole,
    adamw,
    distance,
    grouped,
    loss,
    mlp,
    pieces,
    samples,
    sgd,
    trained,
)
from wholebatch.errors import NonFiniteError, OptionError, UnsupportedError, WindowError
from wholebatch.memory.meter import MemoryMeter


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholebatch.offload.partial_step._SMALLEST_BUCKET", 700)


class Tied(nn.Module):
    """Tied weights, a parameter that is not used, and one in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.turned = nn.Parameter(torch.randn(6, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(x) @ self.turned)
        return logits


def made(
    model: nn.Module, make: Any = adamw, *, sizes: list[int] | None = None, **options: Any
) -> wb.WholeBatch:
    options = {"optimizer_state": "host", "micro_batch": 4, **options}
    train = wb.WholeBatch(model, make(model), loss=loss, **grouped(options))
    if sizes is not None:
        train._fitting.split = lambda batch: pieces(batch, sizes)  # type: ignore[method-assign]
    return train


def optimizer_of(train: wb.WholeBatch) -> torch.optim.Optimizer:
    return train._ledger.target.optimizers[0]


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


class Replacing(torch.optim.Optimizer):
    """Makes new state tensors in every step, with a name of its own."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["mean"] = 0.5 * state.get("mean", 0.0) + parameter.grad
                    parameter.sub_(group["lr"] * state["mean"])


def replacing(model: nn.Module) -> torch.optim.Optimizer:
    return Replacing(model.parameters())


def same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    states = [optimizer.state_dict()["state"] for optimizer in (one, other)]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][key][name])
        for key, right in states[0].items()
        for name, value in right.items()
        if isinstance(value, Tensor)
    )


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_update_is_that_of_the_undivided_batch(clip_norm: float | None) -> None:
    whole, model = Whole(mlp(), adamw, clip_norm=clip_norm), mlp()
    train = made(model, sizes=[1, 6, 3], clip_norm=clip_norm)
    with watching(model) as parts:
        for _ in range(3):
            whole.step(samples(10))
            train.step(samples(10))
            assert distance(parts.take(), whole.seen.gradients[-1]) <= EXACT
    whole.assert_same(model, at_most=10 * EXACT)
    assert parts.steps > 3 * 2  # bucket by bucket
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make", [fused, amsgrad, adafactor, replacing], ids=lambda make: make.__name__
)
def test_same_bits_as_the_plain_window(dtype: torch.dtype, make: Any) -> None:
    plain, moved = mlp(dtype=dtype), mlp(dtype=dtype)
    one = made(plain, make, optimizer_state="device", clip_norm=0.05)
    other = made(moved, make, clip_norm=0.05)
    for number in (10, 13, 11):
        norms = [train.step(samples(number, dtype=dtype)).grad_norm for train in (one, other)]
        assert norms[0] == norms[1]
    assert all(map(torch.equal, plain.parameters(), moved.parameters()))
    assert same_state(optimizer_of(one), optimizer_of(other))
    assert all(p.grad_dtype is p.dtype for p in moved.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_tied_weights_unused_parameters_and_other_memory_orders(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (7, 5), generator=generator)
    batch = {"x": tokens, "y": tokens.roll(1, 1)}
    models = [Tied().to(dtype) for _ in range(2)]
    for model, place in zip(models, ("device", "host"), strict=True):
        train = made(model, micro_batch=3, optimizer_state=place)
        for _ in range(3):
            train.step(batch)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_the_state_waits_on_the_host() -> None:
    model = mlp(dtype=torch.float32)
    train = made(model)
    optimizer = optimizer_of(train)
    batch = samples(10, dtype=torch.float32)
    train.step(batch)

    def kept() -> list[Tensor]:
        names = ("exp_avg", "exp_avg_sq")
        return [optimizer.state[p][name] for p in model.parameters() for name in names]

    store: Any = train._ledger.store
    home = kept()
    assert {id(one) for one in store._state._host.values()} >= {id(one) for one in home}
    assert store.host_bytes >= sum(one.nbytes for one in home)
    before = copy.deepcopy(home)
    seen: list[int] = []

    def check(done: int, of: int) -> None:
        assert all(map(torch.equal, kept(), before))  # a checkpoint made now has the state
        seen.append(done)

    train.step(batch, after_micro=check)
    assert seen == [1, 2, 3]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(one is not other for one, other in zip(kept(), home, strict=True))
    train.step(batch)
    assert all(one is other for one, other in zip(kept(), home, strict=True))


def test_a_checkpoint_of_two_dtypes_can_be_saved_and_loaded(tmp_path: Path) -> None:
    def mixed() -> nn.Module:
        model = mlp(dtype=torch.float32)
        model[0].to(torch.float64)
        return nn.Sequential(model[0], Rounded(), *model[1:])

    straight = mixed()
    train = made(straight)
    train.step(samples(10))
    torch.save([straight.state_dict(), optimizer_of(train).state_dict()], tmp_path / "saved.pt")
    train.step(samples(11))
    resumed = mixed()
    again = made(resumed, optimizer_state="device")
    model, optimizer = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed.load_state_dict(model)
    optimizer_of(again).load_state_dict(optimizer)
    again.step(samples(11))
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_the_device_holds_little_state() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(24)], nn.Linear(128, 3))
    batch = {"x": torch.randn(4, 128), "y": torch.zeros(4, dtype=torch.long)}
    size = sum(p.numel() * 4 for p in model.parameters())
    peaks = {}
    for place in ("device", "host"):
        one = copy.deepcopy(model)
        train = made(one, optimizer_state=place, micro_batch=2)
        train.step(batch)
        with MemoryMeter(model=one, optimizer=optimizer_of(train)) as meter:
            train.step(batch)
        # On a CPU the meter counts the host memory too.
        peaks[place] = meter.peak - getattr(train._ledger.store, "host_bytes", 0)
    assert peaks["host"] <= peaks["device"] - 1.5 * size


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_not_finite_leaves_everything_as_it_was(policy: Any) -> None:
    model = mlp()
    train = made(model, nonfinite=policy)
    train.step(samples(10))
    optimizer = optimizer_of(train)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    bad = samples(10)
    bad["x"][7] = float("nan")
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="micro-batch 2 of 3"):
            train.step(bad)
    else:
        assert train.step(bad).skipped is not None
    assert all(torch.equal(before[0][name], now) for name, now in model.state_dict().items())
    after = optimizer.state_dict()["state"]
    for key, kept in before[1].items():
        assert all(torch.equal(kept[name], after[key][name]) for name in kept)
    train.step(samples(10))


def test_out_of_memory_begins_again() -> None:
    model, reference = mlp(), mlp()
    train, other = (made(one, micro_batch=size) for one, size in ((model, 8), (reference, 4)))
    train.step(samples(4))
    other.step(samples(4))

    def large_fails(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) > 4:
            raise torch.OutOfMemoryError("too large")

    model.register_forward_pre_hook(large_fails)
    train.step(samples(10))
    assert train.recoveries == 1
    other.step(samples(10))
    assert all(map(torch.equal, reference.parameters(), model.parameters()))


def test_hooks_loss_scales_schedulers_and_accumulators() -> None:
    plain, moved = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    for model, place in ((plain, "device"), (moved, "host")):
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        posted: list[int] = []
        optimizer.register_step_post_hook(lambda *_, posted=posted: posted.append(1))
        acc = wb.Accumulator(
            model,
            optimizer,
            steps=3,
            clip_norm=0.1,
            scheduler=scheduler,
            close=wb.Close(scaler=scaler),
            memory=wb.Memory(optimizer_state=place),
        )
        batch = samples(14, dtype=torch.float32)
        assert len(trained(model, acc, pieces(batch, [4, 4, 1, 2, 3]))) == 2
        assert posted == [1, 1]
        assert scheduler.get_last_lr() == [0.01 / 4]
    assert all(map(torch.equal, plain.parameters(), moved.parameters()))


@pytest.mark.parametrize("fails_in", [1, 3])
def test_a_step_that_fails_leaves_the_state_of_its_bucket(fails_in: int) -> None:
    model = mlp()
    train = made(model)
    train.step(samples(10))
    optimizer = optimizer_of(train)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    calls = []
    real = type(optimizer).step

    def fails(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == fails_in:
            raise torch.OutOfMemoryError("out of memory")
        return real(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(optimizer), "step", fails)
        with pytest.raises(torch.OutOfMemoryError, match="from the last checkpoint"):
            train.step(samples(10))
    host = train._ledger.store._state._host.values()  # type: ignore[attr-defined]
    after = optimizer.state_dict()["state"]
    everything = [value for state in optimizer.state.values() for value in state.values()]
    assert all(any(value is place for place in host) for value in everything if value.dim())
    if fails_in == 1:
        for key, kept in before.items():
            assert all(torch.equal(kept[name], after[key][name]) for name in kept)


class AcrossParameters(torch.optim.SGD):
    """Divides by the norm over all parameters of a group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(given)
            for gradient in given:
                gradient.div_(norm)
        super().step()


class CountsCalls(torch.optim.Optimizer):
    """Keeps the number of steps in the group, not with each parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] / group["steps"] * parameter.grad)


class NeedsMore(torch.optim.SGD):
    def __init__(self, parameters: Any, mine: int, **options: Any) -> None:
        super().__init__(parameters, **options)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda m: AcrossParameters(m.parameters(), lr=0.1), "AcrossParameters: .*updates differ"),
        (lambda m: CountsCalls(m.parameters()), "CountsCalls: .*updates differ"),
        (lambda m: NeedsMore(m.parameters(), 1, lr=0.1), "NeedsMore: .*TypeError"),
        (lambda m: torch.optim.AdamW(m.parameters(), capturable=True), "leave capturable out"),
    ],
)
def test_optimizers_that_are_not_per_parameter_are_refused(make: Any, why: str) -> None:
    with pytest.raises(UnsupportedError, match=f'optimizer_state="host" with {why}|{why}'):
        made(mlp(), make)


def test_refusals() -> None:
    with pytest.raises(OptionError, match='optimizer_state=\'disk\': must be "device" or "host"'):
        made(mlp(), optimizer_state="disk")
    with pytest.raises(OptionError, match="optimizer=None with optimizer_state="):
        made(mlp(), lambda model: None)
    with pytest.raises(WindowError, match=r'gradient\(\) with optimizer_state="host".*use step'):
        made(mlp()).gradient(samples(10))

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    with pytest.raises(
        UnsupportedError, match=r'"host" with a step pre-hook on SGD.*several times'
    ):
        made(mlp(), hooked)
