"""Gradients in the place of Adam's moments: the bits of the plain window, in memory that it has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.offload.seen import watching
from tests.offload.test_host import Tied, loss
from tests.support import EXACT, Whole, adamw, distance, mlp, pieces, samples, sgd, trained
from wholebatch.errors import NonFiniteError, OptionError, UnsupportedError
from wholebatch.memory.meter import MemoryMeter
from wholebatch.options import grouped

SPLITS = [[10], [4, 4, 2], [1, 6, 3]]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholebatch.offload.parameter_buckets._SMALLEST_BUCKET", 700)


def made(
    model: nn.Module, make: Any = adamw, *, sizes: list[int] | None = None, **options: Any
) -> wb.WholeBatch:
    options = {"gradients": "swap", "micro_batch": 4, **options}
    train = wb.WholeBatch(model, make(model), loss=loss, **grouped(options))
    if sizes is not None:
        train._fitting.split = lambda batch: pieces(batch, sizes)  # type: ignore[method-assign]
    return train


def optimizer_of(train: wb.WholeBatch) -> torch.optim.Optimizer:
    return train._window.target.optimizers[0]


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 0.05}, {"units": lambda m: len(m["y"])}],
    ids=["plain", "clipped", "units"],
)
def test_update_is_that_of_the_undivided_batch(sizes: list[int], options: dict[str, Any]) -> None:
    clips = {name: value for name, value in options.items() if name.startswith("clip")}
    whole, model = Whole(mlp(), adamw, **clips), mlp()
    train = made(model, sizes=sizes, **options)
    with watching(model) as parts:
        for _ in range(3):
            whole.step(samples(10))
            train.step(samples(10))
            assert distance(parts.take(), whole.seen.gradients[-1]) <= EXACT
    whole.assert_same(model, at_most=10 * EXACT)
    assert parts.steps > 3 * 2  # bucket by bucket
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [adamw, fused, amsgrad], ids=lambda make: make.__name__)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_same_bits_as_the_plain_window(
    dtype: torch.dtype, make: Any, clip_norm: float | None
) -> None:
    plain, swapped = mlp(dtype=dtype), mlp(dtype=dtype)
    one = made(plain, make, gradients="device", clip_norm=clip_norm)
    other = made(swapped, make, clip_norm=clip_norm)
    for number in (10, 13, 11):
        norms = [train.step(samples(number, dtype=dtype)).grad_norm for train in (one, other)]
        assert norms[0] == norms[1]
    assert all(map(torch.equal, plain.parameters(), swapped.parameters()))
    states = [optimizer_of(train).state_dict()["state"] for train in (one, other)]
    assert states[0].keys() == states[1].keys()
    for key, right in states[0].items():
        assert all(torch.equal(right[name], states[1][key][name]) for name in right)
    assert all(p.grad_dtype is p.dtype for p in swapped.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moments_that_stay_beside_recorded_steps(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wholebatch.offload.parameter_buckets._SMALLEST_BUCKET", 16)
    models = [mlp(dtype=dtype) for _ in range(2)]
    plain, swapped = made(models[0], gradients="device"), made(models[1])
    store: Any = swapped._window.store
    store.for_graphs([])  # as if micro-steps were recorded
    optimizer = optimizer_of(swapped)
    orders = []
    for number in range(7):
        for train in (plain, swapped):
            train.step(samples(10 + number, dtype=dtype))
        assert all(map(torch.equal, *(model.parameters() for model in models)))
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            right = optimizer_of(plain).state[one]
            assert all(torch.equal(right[name], optimizer.state[other][name]) for name in right)
        [way] = store._ways.values()
        assert len(way.rows) == 3 < len(store._sums.buckets)
        orders.append([store._place(bucket) for bucket in store._sums.buckets])
        if number == 3:  # a step that fails before it changes anything
            step = type(optimizer).step
            with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(type(optimizer), "step", _fails)
                swapped.step(samples(10, dtype=dtype))
            assert type(optimizer).step is step
        if number == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert orders[0] != orders[1]  # those that have stayed are the first to leave


def _fails(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_tied_weights_unused_parameters_and_other_memory_orders(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (7, 5), generator=generator)
    batch = {"x": tokens, "y": tokens.roll(1, 1)}
    models = [Tied().to(dtype) for _ in range(2)]
    for model, gradients in zip(models, ("device", "swap"), strict=True):
        train = made(model, micro_batch=3, gradients=gradients)
        for _ in range(3):
            train.step(batch)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moments_wait_on_the_host(dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    train = made(model)
    optimizer = optimizer_of(train)
    names = ("exp_avg",) if dtype is torch.float32 else ("exp_avg", "exp_avg_sq")
    train.step(samples(10, dtype=dtype))

    def kept() -> list[int]:
        return [optimizer.state[p][name].data_ptr() for p in model.parameters() for name in names]

    store: Any = train._window.store
    home = kept()
    rows = [bucket.flat for bucket in store._sums.buckets]
    assert all(any(_holds(row, address) for row in rows) for address in home)
    before = copy.deepcopy([optimizer.state[p] for p in model.parameters()])
    looked: list[int] = []

    def look(done: int, of: int) -> None:
        assert kept() == home  # a checkpoint made now has the moments
        for p, held in zip(model.parameters(), before, strict=True):
            assert p.grad is not None
            assert p.grad.dtype is torch.float32
            assert all(torch.equal(optimizer.state[p][name], held[name]) for name in names)
        looked.append(done)

    train.step(samples(10, dtype=dtype), after_micro=look)
    assert looked == [1, 2, 3]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert kept() != home
    train.step(samples(10, dtype=dtype))
    assert kept() == home


def _holds(row: Tensor, address: int) -> bool:
    return row.data_ptr() <= address < row.data_ptr() + row.nbytes


def test_the_device_holds_no_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(24)], nn.Linear(128, 3))
    batch = {"x": torch.randn(4, 128), "y": torch.zeros(4, dtype=torch.long)}
    size = sum(p.numel() * 4 for p in model.parameters())
    peaks = {}
    for gradients in ("device", "swap"):
        one = copy.deepcopy(model)
        train = made(one, gradients=gradients, micro_batch=2)
        train.step(batch)
        with MemoryMeter(model=one, optimizer=optimizer_of(train)) as meter:
            train.step(batch)
        # On a CPU the meter sees the moments that wait, too.
        peaks[gradients] = meter.peak - getattr(train._window.store, "host_bytes", 0)
    assert peaks["swap"] <= peaks["device"] - 0.8 * size


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
    train, other = (made(one, sizes=[4, 4, 2]) for one in (model, reference))
    for one in (train, other):
        one.step(samples(10))

    def large_fails(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) > 4:
            raise torch.OutOfMemoryError("too large")

    model.register_forward_pre_hook(large_fails)
    train._fitting.split = lambda batch: pieces(batch, [2, 8])  # type: ignore[method-assign]
    train.step(samples(10))
    assert train.recoveries == 1
    other._fitting.split = lambda batch: pieces(batch, [2, 4, 4])  # type: ignore[method-assign]
    other.step(samples(10))
    assert all(map(torch.equal, reference.parameters(), model.parameters()))


@pytest.mark.parametrize("after", ["swap", "device"])
def test_resume_in_the_middle_of_a_window(after: str) -> None:
    straight = mlp()
    train = made(straight)
    train.step(samples(10))
    saved: dict[str, Any] = {}

    def keep(done: int, of: int) -> None:
        if done == 2:
            state = {"train": train.state_dict(), "optimizer": optimizer_of(train).state_dict()}
            saved.update(copy.deepcopy({**state, "model": straight.state_dict()}))

    train.step(samples(11), after_micro=keep)
    resumed = mlp()
    again = made(resumed, gradients=after)
    resumed.load_state_dict(saved["model"])
    optimizer_of(again).load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["train"])
    again.step(samples(11))
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))


def test_hooks_loss_scales_schedulers_and_accumulators() -> None:
    plain, swapped = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    for model, gradients in ((plain, "device"), (swapped, "swap")):
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
            memory=wb.Memory(gradients=gradients),
        )
        batch = samples(14, dtype=torch.float32)
        assert len(trained(model, acc, pieces(batch, [4, 4, 1, 2, 3]))) == 2
        assert posted == [1, 1]
        assert scheduler.get_last_lr() == [0.01 / 4]
    assert all(map(torch.equal, plain.parameters(), swapped.parameters()))


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="with SGD: gradients can take the place"):
        made(mlp(), sgd)
    with pytest.raises(OptionError, match='add gradients="host"'):
        made(mlp(), optimizer_on="host")
