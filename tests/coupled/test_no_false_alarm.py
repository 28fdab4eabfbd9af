"""Correct models and losses pass the test of the first window, and it changes no bit of the update.

`tests/programs` has many more correct models and losses, in every interface.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.support import Whole, loss, mlp, samples, sgd

Made = tuple[nn.Module, Callable[[Any, Any], Any]]


def layers(*inside: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), *inside, nn.Linear(16, 3))


def of(run: Callable[[Tensor], Tensor], *owned: nn.Module) -> nn.Module:
    """A model with these modules and this forward."""
    model = nn.ModuleList(owned)
    model.forward = run  # type: ignore[method-assign]
    return model


def checkpointed() -> Made:
    inside, last = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.4), nn.Tanh()), nn.Linear(16, 3)

    def run(x: Tensor) -> Tensor:
        made = checkpoint(inside, x.clone().requires_grad_(), use_reentrant=False)
        logits: Tensor = last(made)
        return logits

    return of(run, inside, last), loss


def mixed_up() -> Made:
    """The partner of a sample is drawn from its micro-batch: nothing that could be held."""

    def mixed(model: Any, micro: Any) -> wb.Loss:
        share, order = torch.rand(()), torch.randperm(len(micro["y"]))
        logits = model(share * micro["x"] + (1 - share) * micro["x"][order])
        one, other = (wb.cross_entropy(logits, y) for y in (micro["y"], micro["y"][order]))
        return wb.Loss(share * one.total + (1 - share) * other.total, one.units)

    return mlp(), mixed


def drawn_on_the_host() -> Made:
    def scaled(model: Any, micro: Any) -> wb.Loss:
        by = torch.tensor([random.random() for _ in micro["y"]])
        return wb.cross_entropy(model(micro["x"] * by[:, None]), micro["y"])

    return mlp(), scaled


def time_major() -> Made:
    """Noise over a dimension in which samples are not one after the other."""

    def noisy(model: Any, micro: Any) -> wb.Loss:
        flat = micro["x"].T.reshape(-1)
        flat = flat + torch.randn_like(flat)
        return wb.cross_entropy(model(flat.view(5, -1).T), micro["y"])

    return mlp(), noisy


def experts() -> Made:
    router, each = nn.Linear(5, 4), [nn.Linear(5, 3) for _ in range(4)]

    def run(x: Tensor) -> Tensor:
        chances = router(x).softmax(-1)
        chosen = chances.argmax(-1)
        out = x.new_zeros(len(x), 3)
        for place, expert in enumerate(each):
            rows = (chosen == place).nonzero()[:, 0]
            out = out.index_put((rows,), expert(x[rows]) * chances[rows, place, None])
        return out

    return of(run, router, *each), loss


def penalised() -> Made:
    """A gradient penalty: the loss function goes back itself."""

    def penalty(model: Any, micro: Any) -> wb.Loss:
        x = micro["x"].clone().requires_grad_()
        logits = model(x)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        total = F.cross_entropy(logits, micro["y"], reduction="sum")
        return wb.Loss(total + slope.square().sum(), len(x))

    return mlp(), penalty


def cancelling() -> Made:
    def difference(model: Any, micro: Any) -> wb.Loss:
        gap = model(micro["x"])[:, 0] - model(-micro["x"])[:, 0]
        return wb.Loss((gap - gap.detach()).sum(), len(gap))  # zero but for rounding

    return mlp(), difference


def embedded() -> Made:
    bag, last = nn.EmbeddingBag(11, 8), nn.Linear(8, 3)
    return of(lambda x: last(bag((x.abs() * 10).long() % 11)), bag, last), loss


CASES: dict[str, Callable[[], Made]] = {
    "dropout": lambda: (layers(nn.Dropout(0.5), nn.ReLU()), loss),
    "checkpoints": checkpointed,
    "mixup": mixed_up,
    "drawn on the host": drawn_on_the_host,
    "time-major noise": time_major,
    "BatchNorm": lambda: (layers(nn.BatchNorm1d(16), nn.Dropout(0.2)), loss),
    "spectral norm": lambda: (
        layers(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.ReLU()),
        loss,
    ),
    "experts": experts,
    "gradient penalty": penalised,
    "a loss of zero": cancelling,
    "embedding bag": embedded,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_no_alarm_and_no_trace(name: str, dtype: torch.dtype) -> None:
    for micro_batch, size in [(20, 45), (4, 10)]:
        torch.manual_seed(5)
        made, function = CASES[name]()
        made = made.to(dtype)
        after = []
        start = copy.deepcopy(made.state_dict())
        for audit in (False, True):
            made.load_state_dict(start)
            train = wb.WholeBatch(
                made, sgd(made), loss=function, micro_batch=micro_batch, audit=audit
            )
            torch.manual_seed(11)
            random.seed(11)
            train.step(samples(size, dtype=dtype))
            after.append(copy.deepcopy(made.state_dict()))
        assert all(torch.equal(value, after[1][key]) for key, value in after[0].items())


def test_no_alarm_for_lists_of_samples() -> None:
    """As detectors take them: images of several sizes, and a dict of boxes for each."""

    def boxes(model: nn.Module, micro: Any) -> wb.Loss:
        total, units = torch.zeros((), dtype=torch.float64), 0
        for image, target in zip(micro["images"], micro["targets"], strict=True):
            made = model(image.mean((1, 2)))
            total = total + (made - target["boxes"]).abs().sum()
            units += len(target["boxes"])
        return wb.Loss(total, units)

    generator = torch.Generator().manual_seed(3)
    batch = {
        "images": [torch.rand(5, 4 + i % 3, 6, generator=generator).double() for i in range(10)],
        "targets": [{"boxes": torch.rand(1 + i % 4, 3).double()} for i in range(10)],
    }
    model = mlp()
    assert wb.WholeBatch(model, sgd(model), loss=boxes, micro_batch=4).step(batch).update


def test_no_alarm_for_terms_several_models_and_encoders() -> None:
    def terms(models: Any, micro: Any) -> Any:
        logits, rest = models["a"](micro["x"]), models["b"](micro["x"])
        counts = micro["y"] > 0
        total = F.cross_entropy(logits, micro["y"], reduction="sum")
        return wb.Loss.terms(
            {"ce": (total, len(logits)), "aux": (rest[counts].square().sum(), counts.sum(), 0.1)}
        )

    def units(micro: Any) -> dict[str, Any]:
        return {"ce": len(micro["y"]), "aux": (micro["y"] > 0).sum()}

    models = {"a": mlp(), "b": mlp()}
    both = torch.optim.SGD([p for m in models.values() for p in m.parameters()], lr=0.1)
    train = wb.WholeBatch(models, both, loss=terms, units=units, micro_batch=4)
    assert train.step(samples(10)).update
    model = mlp()
    encode = wb.Coupled(
        lambda m, b: {"z": m(b["x"])}, lambda all: wb.losses.info_nce(all["z"], all["z"])
    )
    assert wb.WholeBatch(model, sgd(model), loss=encode, micro_batch=4).step(samples(10)).update
    bad = wb.Coupled(
        lambda m, b: {"z": m(b["x"]) - m(b["x"]).mean(0)},
        lambda all: wb.losses.info_nce(all["z"], all["z"]),
    )
    with pytest.raises(wb.errors.UnsupportedError, match="the function itself"):
        wb.WholeBatch(model, sgd(model), loss=bad, micro_batch=4).step(samples(10))


def test_compiled_modules_are_looked_at_and_not_compiled_again() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def contrast(model: Any, micro: Any) -> wb.Loss:
        z = model(micro["x"])
        return wb.cross_entropy(z @ z.T, torch.arange(len(z)))

    model = torch.compile(mlp(), backend=backend)
    x = samples(4)["x"]
    model(x)
    train = wb.WholeBatch(model, sgd(model), loss=contrast, micro_batch=4)
    with pytest.raises(wb.errors.UnsupportedError, match="the loss of some samples"):
        train.step(samples(10))
    model(x)
    assert len(graphs) == 1


class GroupDeviation(nn.Module):
    """Adds the deviation within each group of neighbouring samples, as minibatch-std does."""

    def __init__(self, group: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.group, self.first, self.last = group, nn.Linear(5, 6), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        deviation = hidden.view(-1, self.group, 6).std(1).mean(1)
        score = self.last(torch.cat([hidden, deviation.repeat_interleave(self.group)[:, None]], 1))
        return score[:, 0]


def of_groups(model: Any, micro: Any) -> wb.Loss:
    return wb.Loss(F.softplus(model(micro["x"])).sum(), len(micro["x"]))


@pytest.mark.parametrize("group, micro", [(2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)])
def test_groups_that_no_micro_batch_cuts_are_exact(group: int, micro: int) -> None:
    model = GroupDeviation(group).double()
    whole = Whole(model, loss=lambda m, b: of_groups(m, b).total / len(b["x"]))
    train = wb.WholeBatch(model, sgd(model), loss=of_groups, micro_batch=micro)
    for _ in range(2):  # tested by few samples, and by a whole micro-batch
        train.step(samples(64))
        whole.step(samples(64))
    whole.assert_same(model)


@pytest.mark.parametrize("group, micro", [(4, 6), (4, 2), (8, 4)])
def test_groups_that_a_micro_batch_cuts_are_refused(group: int, micro: int) -> None:
    model = GroupDeviation(group).double()
    train = wb.WholeBatch(model, sgd(model), loss=of_groups, micro_batch=micro)
    with pytest.raises(
        wb.errors.UnsupportedError, match="make the micro-batch a multiple of k samples"
    ):
        train.step(samples(48))


class CoarseInSixteenBits(torch.autograd.Function):
    """Stands for kernels whose 16-bit gradient is mostly rounding, and another for each size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        [gradient] = gradients
        return gradient * len(gradient) if gradient.dtype == torch.bfloat16 else gradient


@pytest.mark.parametrize("clips", [False, True])
def test_a_16_bit_gradient_of_rounding_is_compared_in_full_precision(clips: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = CoarseInSixteenBits.apply(self.first(x))
            if clips and hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            made: Tensor = self.last(hidden.tanh())
            return made

    model = Net()
    train = wb.WholeBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, micro: wb.cross_entropy(model(micro["x"]).float(), micro["y"]),
        micro_batch=3,
        precision="bf16",
    )
    batch = {"x": torch.randn(12, 6), "y": torch.randint(0, 3, (12,))}
    with (
        pytest.raises(wb.errors.UnsupportedError, match="its gradient is not")
        if clips
        else nullcontext()
    ):
        train.step(batch)
