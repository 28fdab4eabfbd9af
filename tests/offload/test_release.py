"""Gradients that are used and freed in the last backward: the update of the undivided batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.offload.seen import watching
from tests.support import EXACT, Whole, adamw, distance, mlp, pieces, samples, sgd
from wholebatch.errors import LossError, OptionError, WindowError
from wholebatch.offload.parameter_buckets import BUCKET_BYTES
from wholebatch.options import grouped

SPLITS = [[10], [4, 4, 2], [1, 6, 3]]
Micro = dict[str, Tensor]


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def made(
    model: nn.Module, make: Any = adamw, *, sizes: Sequence[int] = (10,), **options: Any
) -> wb.WholeBatch:
    defaults = {"units": lambda m: len(m["y"]), "nonfinite": "skip", "micro_batch": 4}
    options = {"gradients": "release", "loss": loss, **defaults, **options}
    train = wb.WholeBatch(model, make(model), **grouped(options))
    train._fitting.split = lambda batch: pieces(batch, sizes)  # type: ignore[method-assign]
    return train


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.fixture
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUCKET_BYTES, "release", 1100)


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("make", [adamw, momentum, fused], ids=lambda make: make.__name__)
def test_update_is_that_of_the_undivided_batch(sizes: list[int], make: Any) -> None:
    whole, model = Whole(mlp(), make), mlp()
    train = made(model, make, sizes=sizes)
    with watching(model) as parts:
        for _ in range(3):
            whole.step(samples(10))
            norm = torch.linalg.vector_norm(
                torch.stack([g.norm() for g in whole.seen.gradients[-1]])
            )
            step = train.step(samples(10))
            assert distance(parts.take(), whole.seen.gradients[-1]) <= EXACT
            assert step.grad_norm == pytest.approx(float(norm), rel=1e-12)
            assert (step.update, step.skipped) == (train.updates, None)
    whole.assert_same(model, at_most=10 * EXACT)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("_small_buckets")
def test_gradients_never_exist_together() -> None:
    model = mlp()
    train = made(model)
    with watching(model) as parts:
        train.step(samples(10))
    assert parts.steps >= 3
    assert parts.most <= 3
    kept = made(mlp(), gradients="device")
    with watching(kept.model) as parts:
        kept.step(samples(10))
    assert (parts.steps, parts.most) == (1, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [adamw, sgd, fused], ids=lambda make: make.__name__)
def test_same_bits_as_the_plain_window(dtype: torch.dtype, make: Any) -> None:
    plain, other = mlp(dtype=dtype), mlp(dtype=dtype)
    one, two = made(plain, make, gradients="device", sizes=[4, 6]), made(other, make, sizes=[4, 6])
    for _ in range(2):
        one.step(samples(10, dtype=dtype))
        two.step(samples(10, dtype=dtype))
    assert all(map(torch.equal, plain.parameters(), other.parameters()))
    assert all(p.grad_dtype is p.dtype for p in other.parameters())


def test_parameters_that_only_an_earlier_micro_batch_used() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.always, self.sometimes = nn.Linear(5, 3), nn.Linear(5, 3)
            self.never = nn.Linear(2, 2)

        def forward(self, x: Tensor, marks: Tensor) -> Tensor:
            out: Tensor = self.always(x)
            if bool(marks.any()):
                out = out + self.sometimes(x) * marks
            return out

    def marked(model: nn.Module, micro: Micro) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"], micro["marks"]), micro["y"])

    batch = samples(10) | {"marks": torch.zeros(10, 1, dtype=torch.float64)}
    batch["marks"][:3] = 1.0
    whole = Whole(
        Branching().double(),
        adamw,
        loss=lambda m, b: nn.functional.cross_entropy(m(b["x"], b["marks"]), b["y"]),
    )
    model = Branching().double()
    before = model.never.weight.detach().clone()
    whole.step(batch)
    made(model, sizes=[4, 6], loss=marked).step(batch)
    whole.assert_same(model, at_most=10 * EXACT)
    assert torch.equal(model.never.weight, before)


def test_schedulers_ema_and_hooks_once() -> None:
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ema = torch.optim.swa_utils.AveragedModel(model)
    posted: list[int] = []
    optimizer.register_step_post_hook(lambda *_: posted.append(1))
    train = made(model, lambda _: optimizer, scheduler=scheduler, ema=ema)
    for _ in range(3):
        train.step(samples(10))
    assert scheduler.get_last_lr() == [0.01 / 8]
    assert int(ema.n_averaged) == 3
    assert posted == [1, 1, 1]


def test_gradient_hooks_see_the_whole_gradient_once() -> None:
    seen: list[Tensor] = []

    def halved(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * 0.5

    whole, model = Whole(mlp(), sgd), mlp()
    for hooked in (whole.model, model):
        hooked[0].weight.register_hook(halved)
    whole.step(samples(10))
    made(model, sgd, sizes=[4, 4, 2]).step(samples(10))
    whole.assert_same(model)
    assert len(seen) == 2


@pytest.mark.parametrize("make", [adamw, fused], ids=lambda make: make.__name__)
def test_a_loss_that_is_not_finite_changes_nothing(make: Any) -> None:
    model = mlp()
    train = made(model, make, sizes=[4, 4, 2])
    train.step(samples(10))
    before = copy.deepcopy(
        [*model.parameters(), train._window.target.optimizers[0].state_dict()["state"]]
    )
    bad = samples(10)
    bad["x"][2] = float("inf")
    step = train.step(bad)
    assert step.skipped == "micro-batch 1 of 3 has a loss that is not finite"
    assert train.skipped == 1
    assert all(map(torch.equal, before[:-1], model.parameters()))
    after = train._window.target.optimizers[0].state_dict()["state"]
    assert all(torch.equal(before[-1][i]["exp_avg"], after[i]["exp_avg"]) for i in after)
    assert train.step(samples(10)).skipped is None


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("make", [adamw, fused], ids=lambda make: make.__name__)
def test_a_gradient_that_is_not_finite_leaves_its_parameters(make: Any) -> None:
    model = mlp()
    train = made(model, make)
    model[0].weight.register_hook(lambda gradient: gradient * float("nan"))
    before = copy.deepcopy(list(model.parameters()))
    step = train.step(samples(10))
    assert step.skipped == "the losses are finite but the gradients are not"
    assert torch.equal(before[0], model[0].weight)
    assert not torch.equal(before[-1], model[-1].bias)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_exact_batchnorm_and_reentrant_checkpoints_are_stepped_at_the_close() -> None:
    from torch.utils.checkpoint import checkpoint

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.norm, self.read = nn.BatchNorm1d(5), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.read(self.norm(x))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first, self.read = nn.Linear(5, 5), mlp()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.read, self.first(x), use_reentrant=True)
            return y

    for kind in (Normed, Checkpointed):
        whole, model = Whole(kind().double(), sgd), kind().double()
        whole.step(samples(10))
        made(model, sgd, sizes=[4, 4, 2]).step(samples(10))
        whole.assert_same(model)


def test_counts_are_checked_before_anything_moves() -> None:
    model = mlp()
    before = copy.deepcopy(list(model.parameters()))
    train = made(model, units=lambda m: len(m["y"]) + 1, sizes=[4, 6])
    with pytest.raises(LossError, match="counted 12 units"):
        train.step(samples(10))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.usefixtures("_small_buckets")
def test_a_window_that_fails_half_way_cannot_go_on() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("broken")

    model = mlp()
    train = made(model, loss=lambda m, b: wb.cross_entropy(m(b["x"]), b["y"]))
    saved = copy.deepcopy(model.state_dict())
    handle = model[1].register_forward_hook(lambda *args: Breaks.apply(args[2]))
    with pytest.raises(RuntimeError, match="broken"):
        train.step(samples(10))
    handle.remove()
    assert not torch.equal(saved["4.bias"], model[4].bias)
    with pytest.raises(WindowError, match="from the last checkpoint"):
        train.step(samples(10))
    model.load_state_dict(saved)
    train.step(samples(10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 1.0}, "clipping needs the whole gradient"),
        ({"clip_value": 1.0}, "clipping needs the whole gradient"),
        ({"units": None}, "must be known before it is used"),
        ({"nonfinite": "raise"}, "cannot be taken back"),
        ({"precision": "fp16"}, "cannot be taken back"),
    ],
)
def test_options_that_need_the_whole_gradient_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        made(mlp(dtype=torch.float32), **options)
