"""Adam accumulation: an exact first moment, a second one to half its bits, no gradient kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import EXACT, Whole, adamw, distance, mlp, pieces, samples, sgd
from wholebatch.errors import (
    LossError,
    NonFiniteError,
    OptionError,
    StateError,
    UnsupportedError,
)
from wholebatch.options import grouped

SPLITS = [[10], [4, 4, 2], [1, 6, 3]]
Micro = dict[str, Tensor]


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def count(micro: Micro) -> int:
    return int((micro["y"] != -100).sum())


def made(
    model: nn.Module, make: Any = adamw, *, sizes: Sequence[int] = (4, 4, 2), **options: Any
) -> wb.WholeBatch:
    options = {"gradients": "moments", "units": count, "micro_batch": 4, "loss": loss, **options}
    train = wb.WholeBatch(model, make(model), **grouped(options))
    train._fitting.split = lambda batch: pieces(batch, sizes)  # type: ignore[method-assign]
    return train


def decaying(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Two groups with different settings."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": weights, "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)},
        {"params": others, "lr": 0.02, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **options)


# What is kept of the old moments in a window: float32 of float64, and 11 bits of float32.
ROUNDED = {torch.float64: 1e-6, torch.float32: 5e-3}


def batches(dtype: torch.dtype = torch.float64) -> list[Micro]:
    """Some with units that are not samples, all with other gradients."""
    made_of = []
    for number in range(4):
        batch = samples(10, dtype=dtype)
        batch["x"] = batch["x"].roll(number, 0) * (1 + number)
        batch["y"][number] = -100
        made_of.append(batch)
    return made_of


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_first_moment_is_exact_and_the_second_is_rounded(
    sizes: list[int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    whole = Whole(mlp(dtype=dtype), lambda m: decaying(m, **options))
    model = mlp(dtype=dtype)
    train = made(model, lambda m: decaying(m, **options), sizes=sizes)
    optimizer = train._window.target.optimizers[0]
    pairs = list(zip(model.parameters(), whole.model.parameters(), strict=True))
    exact = EXACT if dtype is torch.float64 else 1e-5

    def off(name: str) -> float:
        return distance(
            [optimizer.state[a][name] for a, _ in pairs],
            [whole.optimizer.state[b][name] for _, b in pairs],
        )

    for number, batch in enumerate(batches(dtype)):
        whole.step(batch)
        assert math.isnan(train.step(batch).grad_norm)
        if number == 0:  # moments that are zero have nothing to round
            assert off("exp_avg_sq") <= exact
            assert distance(model.parameters(), whole.model.parameters()) <= exact
        assert off("exp_avg") <= exact
        assert off("exp_avg_sq") <= ROUNDED[dtype]
        with torch.no_grad():  # what follows is of the next update alone
            for a, b in pairs:
                assert float((a - b).norm() / b.norm()) <= ROUNDED[dtype]
                a.copy_(b)
                optimizer.state[a]["exp_avg_sq"].copy_(whole.optimizer.state[b]["exp_avg_sq"])
    assert all(int(optimizer.state[p]["step"]) == 4 for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_bf16_autocast_schedulers_and_ema() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ema = torch.optim.swa_utils.AveragedModel(model)
    posted: list[int] = []
    optimizer.register_step_post_hook(lambda *_: posted.append(1))
    train = made(model, lambda _: optimizer, precision="bf16", scheduler=scheduler, ema=ema)
    for _ in range(3):
        train.step(samples(10, dtype=torch.float32))
    assert scheduler.get_last_lr() == [0.01 / 8]
    assert int(ema.n_averaged) == 3
    assert posted == [1, 1, 1]
    assert optimizer.state[next(model.parameters())]["exp_avg"].dtype is torch.float32


def test_maximize_turns_the_step_around() -> None:
    down, up = mlp(), mlp()
    made(down, lambda m: torch.optim.Adam(m.parameters(), lr=0.01)).step(samples(10))
    made(up, lambda m: torch.optim.Adam(m.parameters(), lr=0.01, maximize=True)).step(samples(10))
    for before, a, b in zip(mlp().parameters(), down.parameters(), up.parameters(), strict=True):
        assert torch.allclose(a - before, before - b, atol=1e-15)


@pytest.mark.parametrize("optimizer_last", [False, True])
def test_resume_in_the_middle_of_a_window(optimizer_last: bool) -> None:
    straight = mlp()
    train = made(straight)
    optimizer = train._window.target.optimizers[0]
    train.step(samples(10))
    saved: dict[str, Any] = {}

    def keep(done: int, of: int) -> None:
        if done == 2:
            saved.update(
                copy.deepcopy(
                    {
                        "train": train.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "model": straight.state_dict(),
                    }
                )
            )

    batch = {name: leaf.flip(0) for name, leaf in samples(10).items()}
    train.step(batch, after_micro=keep)
    resumed = mlp()
    again = made(resumed)
    resumed.load_state_dict(saved["model"])
    if optimizer_last:
        again.load_state_dict(saved["train"])
    again._window.target.optimizers[0].load_state_dict(saved["optimizer"])
    if not optimizer_last:
        again.load_state_dict(saved["train"])
    again.step(batch)
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))

    other = made(mlp(), gradients="device")
    with pytest.raises(StateError, match='gradients="moments"'):
        other.load_state_dict(saved["train"])
    plain = made(mlp(), gradients="device")
    halfway: dict[str, Any] = {}
    plain.step(batch, after_micro=lambda *_: halfway.update(plain.state_dict()))
    with pytest.raises(StateError, match="keeps none"):
        made(mlp()).load_state_dict(halfway)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_window_that_fails_leaves_rounded_moments(policy: str) -> None:
    model = mlp()
    train = made(model, nonfinite=policy)
    optimizer = train._window.target.optimizers[0]
    train.step(samples(10))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    parameters = [p.detach().clone() for p in model.parameters()]
    bad = samples(10)
    bad["x"][7] = float("nan")
    if policy == "skip":
        assert "micro-batch 2 of 3" in str(train.step(bad).skipped)
    else:
        with pytest.raises(NonFiniteError, match="the optimizer's moments too, but rounded"):
            train.step(bad)
    assert all(map(torch.equal, parameters, model.parameters()))
    after = optimizer.state_dict()["state"]
    for name in ("exp_avg", "exp_avg_sq"):
        assert (
            distance([s[name] for s in after.values()], [s[name] for s in before.values()]) <= 1e-7
        )
    assert [s["step"] for s in after.values()] == [s["step"] for s in before.values()]
    train.step(samples(10))


@pytest.mark.parametrize("sizes", [[8, 2], [2, 8]], ids=str)
def test_out_of_memory_begins_again(sizes: list[int]) -> None:
    """Before the first gradient is in the moments, and after."""
    model, reference = mlp(), mlp()

    def large_fails(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) > 4:
            raise torch.OutOfMemoryError("too large")

    train = made(model, sizes=[4, 4, 2])
    other = made(reference, sizes=[4, 4, 2])
    for one in (train, other):
        one.step(samples(10))
    model.register_forward_pre_hook(large_fails)
    train._fitting.split = lambda batch: pieces(batch, sizes)  # type: ignore[method-assign]
    train.step(samples(10))
    assert train.recoveries == 1
    other.step(samples(10))
    assert distance(model.parameters(), reference.parameters()) <= 1e-7


def test_a_window_without_units_changes_nothing() -> None:
    model = mlp()
    train = made(model, zero_units="skip")
    train.step(samples(10))
    optimizer = train._window.target.optimizers[0]
    before = copy.deepcopy(optimizer.state_dict()["state"])
    ignored = samples(10)
    ignored["y"][:] = -100
    assert train.step(ignored).skipped == "no units"
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before[i]["exp_avg"], after[i]["exp_avg"]) for i in before)
    train.step(samples(10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 1.0}, "clipping needs the whole gradient"),
        ({"clip_value": 1.0}, "clipping needs the whole gradient"),
        ({"units": None}, "cannot be divided again"),
        ({"precision": "fp16"}, "with a loss scale"),
    ],
)
def test_options_that_need_the_whole_gradient_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        made(mlp(dtype=torch.float32), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sgd, "with SGD"),
        (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), "use AdamW"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "amsgrad=True"),
        (lambda m: adamw(m.bfloat16()), "16-bit parameters"),
    ],
)
def test_optimizers_without_such_moments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        made(mlp(), make)


def test_what_is_found_later_is_refused_before_a_gradient_is_in() -> None:
    hooked = mlp()
    hooked[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UnsupportedError, match=r"0\.weight has a gradient hook"):
        made(hooked).step(samples(10))
    narrow = mlp()
    train = wb.WholeBatch(
        narrow,
        adamw(narrow),
        loss=lambda m, b: wb.Loss(loss(m, b).total.bfloat16(), count(b)),
        micro_batch=4,
        units=count,
        memory=wb.Memory(gradients="moments"),
    )
    with pytest.raises(LossError, match="return a float32 sum"):
        train.step(samples(10))
    with pytest.raises(OptionError, match="without units="):
        wb.Accumulator(narrow, adamw(narrow), steps=2, memory=wb.Memory(gradients="moments"))
