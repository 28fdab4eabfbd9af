"""Adam accumulation: an exact first moment, a stated second one, and nothing else kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.support import EXACT, Whole, adamw, distance, mlp, pieces, samples, sgd
from wholebatch.errors import (
    LossError,
    NonFiniteError,
    OptionError,
    StateError,
    UnsupportedError,
    WindowError,
)

SPLITS = [[10], [4, 4, 2], [1, 6, 3]]
Micro = dict[str, Tensor]


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def count(micro: Micro) -> int:
    return int((micro["y"] != -100).sum())


def made(
    model: nn.Module, make: Any = adamw, *, sizes: Sequence[int] = (4, 4, 2), **options: Any
) -> wb.WholeBatch:
    options = {"gradients": "moments", "units": count, "micro_batch": 4, **options}
    train = wb.WholeBatch(model, make(model), loss=loss, **options)
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


class ByHand:
    """The same update, written down for one parameter after the other."""

    def __init__(self, model: nn.Module, make: Any) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make(self.model)
        self.moments: dict[Tensor, list[Tensor]] = {}
        self.updates = 0

    def step(self, micros: list[Micro]) -> None:
        units = sum(count(micro) for micro in micros)
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if parameter not in self.moments:
                self.moments[parameter] = [torch.zeros_like(parameter) for _ in range(2)]
        gradients = []
        for micro in micros:
            total = functional.cross_entropy(self.model(micro["x"]), micro["y"], reduction="sum")
            gradients.append(torch.autograd.grad(total / units, parameters))
        self.updates += 1
        by_parameter = dict(zip(parameters, zip(*gradients, strict=True), strict=True))
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                beta1, beta2 = group["betas"]
                for parameter in group["params"]:
                    first, second = self.moments[parameter]
                    parts = by_parameter[parameter]
                    first.mul_(beta1).add_(sum(parts), alpha=1 - beta1)
                    second.mul_(beta2).add_(sum(part**2 for part in parts), alpha=1 - beta2)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    m = first / (1 - beta1**self.updates)
                    v = second / (1 - beta2**self.updates)
                    parameter.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_update_is_what_it_says(sizes: list[int], options: dict[str, Any]) -> None:
    model = mlp()
    by_hand = ByHand(model, decaying)
    train = made(model, lambda m: decaying(m, **options), sizes=sizes)
    for number in range(3):
        batch = samples(10)
        batch["y"][number] = -100  # units that are not samples
        by_hand.step(pieces(batch, sizes))
        step = train.step(batch)
        assert math.isnan(step.grad_norm)
    assert distance(model.parameters(), by_hand.model.parameters()) <= EXACT
    optimizer = train._window.target.optimizers[0]
    for index, name in enumerate(("exp_avg", "exp_avg_sq")):
        ours = [optimizer.state[p][name] for p in model.parameters()]
        right = [by_hand.moments[p][index] for p in by_hand.model.parameters()]
        assert distance(ours, right) <= EXACT
    assert all(int(optimizer.state[p]["step"]) == 3 for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_first_moment_is_exact_and_the_second_lies_between(sizes: list[int]) -> None:
    whole, model = Whole(mlp(), adamw), mlp()
    whole.step(samples(10))
    train = made(model, sizes=sizes)
    train.step(samples(10))
    ours, right = train._window.target.optimizers[0].state, whole.optimizer.state
    pairs = list(zip(model.parameters(), whole.model.parameters(), strict=True))
    first = [(ours[a]["exp_avg"], right[b]["exp_avg"]) for a, b in pairs]
    assert distance(*zip(*first, strict=True)) <= EXACT
    for a, b in pairs:  # (Σg)² ≤ K Σg², for any gradients
        whole_v, our_v = right[b]["exp_avg_sq"], ours[a]["exp_avg_sq"]
        assert bool((whole_v <= len(sizes) * our_v * (1 + 1e-9) + 1e-30).all())
    if len(sizes) == 1:
        whole.assert_same(model, at_most=10 * EXACT)
    else:
        second = [(ours[a]["exp_avg_sq"], right[b]["exp_avg_sq"]) for a, b in pairs]
        assert distance(*zip(*second, strict=True)) > 0.01


def test_gradients_do_not_add_up_in_memory() -> None:
    model = mlp()
    train = made(model, sizes=[1] * 10)
    held: list[int] = []

    def look(*_: int) -> None:
        held.append(sum(p.grad is not None for p in model.parameters()))

    train.step(samples(10), after_micro=look)
    assert held == [0] * 10


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


def test_resume_in_the_middle_of_a_window() -> None:
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
    again._window.target.optimizers[0].load_state_dict(saved["optimizer"])
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


def test_a_window_that_fails_after_the_first_gradient_cannot_go_on() -> None:
    model = mlp()
    train = made(model)
    optimizer = train._window.target.optimizers[0]
    train.step(samples(10))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    bad = samples(10)
    bad["x"][7] = float("nan")
    with pytest.raises(NonFiniteError, match="the optimizer's moments hold its gradients"):
        train.step(bad)
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(WindowError, match=r"load_state_dict"):
        train.step(samples(10))
    optimizer.load_state_dict(checkpoint)
    train.step(samples(10))


def test_out_of_memory_before_the_first_gradient_begins_again() -> None:
    model, reference = mlp(), mlp()

    def large_fails(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) > 4:
            raise torch.OutOfMemoryError("too large")

    model.register_forward_pre_hook(large_fails)
    train = made(model, sizes=[8, 2])
    train.step(samples(10))
    assert train.recoveries == 1
    made(reference, sizes=[4, 4, 2]).step(samples(10))
    assert all(map(torch.equal, reference.parameters(), model.parameters()))


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
        ({"nonfinite": "skip"}, "taken out of the moments again"),
        ({"precision": "fp16"}, "taken out of the moments again"),
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
        gradients="moments",
    )
    with pytest.raises(LossError, match="return a float32 sum"):
        train.step(samples(10))
    with pytest.raises(OptionError, match="without units="):
        wb.Accumulator(narrow, adamw(narrow), steps=2, gradients="moments")
