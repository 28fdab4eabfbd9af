"""Weight gradients that add themselves in eager code: the same update, or autograd's own way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.compile.nets import Micro, Tagger, loss, mean_of_tokens, tagged
from tests.support import Seen, Whole, distance, measured, mlp, samples, sgd
from wholebatch.compile import fused_weight_grad as fused
from wholebatch.compile.fused_weight_grad import Adding


@pytest.fixture(autouse=True)
def _also_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adding, "anywhere", True)


def added(train: wb.WholeBatch) -> int:
    return train._runner.executor._eager.added


def trained(
    model: nn.Module,
    loss: Callable[[Any, Micro], wb.Loss],
    batches: list[Micro],
    **options: Any,
) -> wb.WholeBatch:
    optimizer = options.pop("optimizer", None) or sgd(model)
    options = {"micro_batch": 2, "execute": "eager", "audit": False, **options}
    train = measured(model, optimizer, loss=loss, **{"noise": None, **options})
    for batch in batches:
        train.step(batch)
    return train


def without(model: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
    """The same training with gradients that autograd adds, from a copy of the model."""
    other = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adding, "anywhere", False)
        assert added(trained(other, *arguments, **options)) == 0
    return other


def assert_same(ours: nn.Module, other: nn.Module, start: nn.Module, limit: float) -> None:
    moved = [
        [
            a.detach().double() - b.detach().double()
            for a, b in zip(one.parameters(), start.parameters(), strict=True)
        ]
        for one in (ours, other)
    ]
    assert distance(moved[0], moved[1]) <= limit


def test_tied_and_padded_and_unused_weights() -> None:
    model = Tagger().double()
    whole = Whole(model, loss=mean_of_tokens, clip_norm=0.2)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    sizes = (7, 6, 1)
    train = trained(
        model, loss, [tagged(n) for n in sizes], optimizer=optimizer, micro_batch=3, clip_norm=0.2
    )
    for number in sizes:
        whole.step(tagged(number))
    # qkv, the output layer and the embedding, which is the same weight, at every micro-batch but
    # the first of a window, whose gradients become `.grad`.
    assert added(train) == 3 * (2 + 1)
    assert model.spare.weight.grad is None
    whole.assert_same(model, seen)


class Odd(nn.Module):
    """Layers that are not to be touched beside two that are, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.twice = nn.Linear(5, 5)
        self.once = nn.Linear(5, 5, bias=False)
        self.direct = nn.Linear(5, 5)
        self.normed = parametrizations.weight_norm(nn.Linear(5, 5))
        self.own = Own(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.hooked = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = x + functional.linear(x, self.direct.weight, self.direct.bias)
        x = torch.tanh(self.normed(x) + self.own(x) + self.frozen(x) + self.once(x[:, None])[:, 0])
        out: Tensor = self.hooked(x)
        return out


class Own(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def test_layers_that_are_left_alone_and_hooks_of_the_user() -> None:
    model = Odd().double()
    whole = Whole(model)
    calls = []
    for one in (model, whole.model):
        one.hooked.weight.register_hook(lambda g: calls.append(len(g)) or g.clamp(-0.01, 0.01))
    train = trained(model, loss, [samples(9), samples(4)])
    for number in (9, 4):
        whole.step(samples(number))
    # `twice` two times, `once`, and `hooked`, whose hook sees the window's whole gradient.
    assert len(calls) == 4
    assert added(train) == 4 * (4 + 1)
    whole.assert_same(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_gradient_penalty_in_the_loss_is_autograds_own() -> None:
    """A backward within the loss function is not the window's, and is differentiated again."""

    def total(model: nn.Module, micro: Micro, reduction: str) -> Tensor:
        x = micro["x"].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        per_sample = functional.cross_entropy(out, micro["y"], reduction="none")
        per_sample = per_sample + slope.square().sum(1)
        return per_sample.sum() if reduction == "sum" else per_sample.mean()

    model = mlp()
    whole = Whole(model, loss=lambda model, micro: total(model, micro, "mean"))
    train = trained(
        model,
        lambda model, micro: wb.Loss(total(model, micro, "sum"), len(micro["x"])),
        [samples(9), samples(5)],
    )
    for number in (9, 5):
        whole.step(samples(number))
    assert added(train) > 0
    whole.assert_same(model)


def test_checkpointed_blocks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(5, 5), mlp(5, 5)
            self.last = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.inner, torch.tanh(self.first(x)), use_reentrant=False)
            out: Tensor = self.last(x)
            return out

    model = Net().double()
    whole = Whole(model)
    train = trained(model, loss, [samples(9), samples(5)])
    for number in (9, 5):
        whole.step(samples(number))
    assert added(train) == 2 * (4 + 2)  # `first` and `last`, after the first of 5 and of 3
    whole.assert_same(model)


@pytest.mark.parametrize("kind", ["autocast", "parameters"])
def test_bf16_rounds_as_autograd_does_on_a_cpu(kind: str) -> None:
    """Without a kernel that adds into fp32 the numbers are autograd's own, bit for bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    options: dict[str, Any] = {"precision": "bf16"}
    batches = [samples(9, dtype=torch.float32)]
    if kind == "parameters":
        model, options = model.bfloat16(), {}
        batches = [samples(9, dtype=torch.bfloat16)]
    start = copy.deepcopy(model)
    other = without(model, loss, batches, **options)
    train = trained(model, loss, batches, **options)
    assert added(train) > 0
    assert_same(model, other, start, 2e-3)
    weights = [(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)]
    assert all(torch.equal(a, b) for a, b in weights if a.dim() == 2)


def test_sixteen_bit_copies_follow_the_weights() -> None:
    """Once per window; a weight that is changed within it is cast again."""
    model = nn.Linear(4, 2, bias=False)
    train = trained(model, loss, [], precision="bf16")
    precision = train._runner._precision
    precision.begin()
    first = precision.copy_of(model.weight, torch.bfloat16)
    assert precision.copy_of(model.weight, torch.bfloat16) is first
    with torch.no_grad():
        model.weight.mul_(2.0)
    assert torch.equal(precision.copy_of(model.weight, torch.bfloat16), 2.0 * first)
    precision.end()
    assert not precision._copies  # type: ignore[attr-defined]


def test_parts_that_the_user_compiled_and_copies_of_the_model() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.inner, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
            self.part: Any = torch.compile(self.tanh, backend="eager", fullgraph=True)

        def tanh(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                kept = copy.deepcopy(self.last)(self.tanh(x))
            out: Tensor = self.last(self.part(x)) + 0.1 * kept
            return out

    torch._dynamo.reset()
    model, plain = Net().double(), Net().double()
    start = copy.deepcopy(dict(model.named_parameters()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adding, "anywhere", False)
        trained(plain, loss, [samples(8)])
    train = trained(model, loss, [samples(8)])
    assert added(train) == 3  # `last` alone
    for name, parameter in model.named_parameters():
        ours = parameter.detach() - start[name].detach()
        theirs = plain.get_parameter(name).detach() - start[name].detach()
        assert distance([ours], [theirs]) <= 1e-12


def test_torch_func_and_modes_see_the_layer_itself() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def total(model: nn.Module, micro: Micro) -> wb.Loss:
        counter = FlopCounterMode(display=False)
        with counter:
            out = model(micro["x"])
        assert counter.get_total_flops() > 0
        mapped = torch.func.vmap(model)(micro["x"])
        return wb.cross_entropy(out + mapped, micro["y"])

    model = mlp()
    whole = Whole(
        model,
        loss=lambda model, micro: functional.cross_entropy(2 * model(micro["x"]), micro["y"]),
    )
    train = trained(model, total, [samples(7)])
    whole.step(samples(7))
    assert added(train) == 0
    whole.assert_same(model)


def test_who_waits_for_single_gradients_gets_them() -> None:
    """The noise scale reads the growing sum instead, and other stores keep autograd's addition."""
    model = mlp()
    train = trained(model, loss, [samples(8)] * 3, noise=1)
    assert added(train) > 0
    assert train.noise is not None


def test_looking_for_the_kernel_draws_no_random_numbers() -> None:
    """It is looked for in the first micro-step, also of a run that goes on from a checkpoint."""
    before = torch.get_rng_state()
    assert not fused._adds(torch.device("cpu"), torch.bfloat16, (5, 7, 3))  # a CPU has none
    assert torch.equal(torch.get_rng_state(), before)
