"""`wb.verify`: a right window is called right, a wrong one wrong, and for the right reason."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.support import loss, mlp, samples
from wholebatch.verification.starting_state import StartingState

F32 = torch.float32


def small(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), *middle, nn.ReLU(), nn.Linear(16, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# ------------------------------------------------------------------- it is the same


@pytest.mark.parametrize("precision", ["full", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", [None, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("clip_norm", [0.1])
def test_a_right_window_is_the_same(precision: str, make: Any, clip_norm: float) -> None:
    model = mlp(dtype=F32)
    verdict = wb.verify(
        model,
        loss,
        samples(37, dtype=F32),
        micro_batch=5,
        optimizer=make and make(model),
        precision=precision,
        clip_norm=clip_norm,
    )
    assert verdict.same, verdict
    assert bool(verdict)
    assert verdict.exit_status == 0
    assert verdict.line.startswith("same update: gradient ")
    assert verdict.float64 is not None
    assert verdict.float64.distance <= 1e-14
    assert verdict.micro_batches == 8


def test_float64_models_need_no_copy() -> None:
    verdict = wb.verify(mlp(), loss, samples(20), micro_batch=3)
    assert verdict.same
    assert verdict.float64 is None
    assert verdict.gradient.distance <= 1e-14


def test_sixteen_bit_parameters() -> None:
    batch = samples(24, dtype=torch.bfloat16)
    verdict = wb.verify(mlp(dtype=torch.bfloat16), loss, batch, micro_batch=5)
    assert verdict.same, verdict


def test_complex_parameters() -> None:
    model = nn.Linear(5, 3, dtype=torch.complex64)

    def energy(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        out = model(micro["x"].to(torch.complex64))
        return wb.Loss(out.abs().square().sum(), len(out))

    verdict = wb.verify(model, energy, samples(11, dtype=F32), micro_batch=3, float64=False)
    assert verdict.same, verdict
    assert verdict.gradient.distance <= 1e-6


def test_terms_and_counted_units() -> None:
    def terms(model: nn.Module, micro: dict[str, Tensor]) -> Any:
        logits = model(micro["x"])
        aux = logits.square().sum()
        fit = functional.cross_entropy(logits, micro["y"], reduction="sum")
        return wb.Loss.terms({"fit": (fit, len(logits)), "aux": (aux, logits.numel(), 0.1)})

    def units(micro: dict[str, Tensor]) -> dict[str, int]:
        return {"fit": len(micro["y"]), "aux": 3 * len(micro["y"])}

    verdict = wb.verify(mlp(dtype=F32), terms, samples(19, dtype=F32), micro_batch=4, units=units)
    assert verdict.same, verdict


@pytest.mark.parametrize("policy", ["exact", "freeze"])
def test_batchnorm_policies_that_are_exact(policy: str) -> None:
    model = small(nn.BatchNorm1d(16))
    before = [type(module) for module in model.modules()]
    verdict = wb.verify(model, loss, samples(30, dtype=F32), micro_batch=7, batchnorm=policy)
    assert verdict.same, verdict
    said = "not split (BatchNorm)" if policy == "exact" else "in 5 micro-batches"
    assert (said in verdict.line, verdict.undivided) == (True, policy == "exact")
    assert verdict.micro_batches == (1 if policy == "exact" else 5)
    assert ("units of the loss were not tested" in str(verdict)) == verdict.undivided
    assert [type(module) for module in model.modules()] == before, "the conversion was left behind"
    assert not any("forward" in vars(module) for module in model.modules()), "it is still frozen"


@pytest.mark.parametrize("execute", ["eager", "auto"])
def test_options_of_the_engine_are_passed_on(execute: str) -> None:
    verdict = wb.verify(
        mlp(dtype=F32), loss, samples(20, dtype=F32), micro_batch=6, execute=execute
    )
    assert verdict.same, verdict
    with pytest.raises(wb.errors.OptionError, match="execute="):
        wb.verify(mlp(dtype=F32), loss, samples(20, dtype=F32), execute="quickly")


# --------------------------------------------------------------- nothing is touched


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        wb.errors.OptionError, match=r"wb\.verify\(\.\.\., microbatch=.*no such option"
    ):
        wb.verify(mlp(), lambda m, b: m(b["x"]).sum(1), samples(4), microbatch=3)


def test_grouped_options_are_those_of_wholebatch() -> None:
    """Each part of the objects has an effect: the split, the clipping, and where sums are kept."""
    model = small().double()
    batch = {"x": torch.randn(10, 5).double(), "y": torch.randint(0, 3, (10,)), "w": torch.ones(10)}

    def weighed(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        assert len(micro["w"]) == 10
        return loss(model, micro)

    verdict = wb.verify(
        model,
        weighed,
        batch,
        micro_batch=wb.samples(3, static="w"),
        optimizer=torch.optim.AdamW(model.parameters()),
        memory=wb.Memory(optimizer_state="host"),
        close=wb.Close(clip_value=1e-3),
    )
    assert verdict.same, verdict
    assert verdict.micro_batches == 4


@pytest.mark.parametrize("limit", [1e-3, 1e9])
def test_a_clip_value_in_the_close_is_that_of_both_runs(limit: float) -> None:
    seen: list[float] = []
    model = small().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(max(float(p.grad.abs().max()) for p in model.parameters()))  # type: ignore[union-attr]
    )
    batch = {"x": torch.randn(10, 5).double(), "y": torch.randint(0, 3, (10,))}
    close = wb.Close(clip_value=limit)
    assert wb.verify(model, loss, batch, micro_batch=3, optimizer=optimizer, close=close).same
    assert all(largest == limit if limit < 1 else largest > 1e-2 for largest in seen)
    assert len(seen) >= 4  # the undivided batch, again, in other orders, and the window


def test_nothing_is_left_behind() -> None:
    model = small(nn.BatchNorm1d(16), nn.Dropout(0.3))
    optimizer = adamw(model)
    batch = samples(30, dtype=F32)
    loss(model, batch).total.backward()
    optimizer.step()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random_state = torch.get_rng_state()
    wb.verify(model, loss, batch, micro_batch=7, optimizer=optimizer)
    after = (model.state_dict(), optimizer.state_dict())
    for name, value in state[0].items():
        assert torch.equal(value, after[0][name]), name
    assert str(state[1]) == str(after[1])
    assert torch.equal(random_state, torch.get_rng_state())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)
    assert model[2].p == 0.3  # type: ignore[index]
    assert all(module.training for module in model.modules())


def test_start_puts_back_modules_hooks_and_counters() -> None:
    model = small(nn.BatchNorm1d(16))
    model.counter = 3  # type: ignore[assignment]
    start = StartingState(model)
    model.counter = 4  # type: ignore[assignment]
    model.extra = nn.Linear(2, 2)
    handle = model.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[union-attr, operator]
    start.restore()
    assert model.counter == 3
    assert not hasattr(model, "extra")
    assert not model._forward_hooks
    handle.remove()  # the dict is the same one: a handle still knows it
    assert bool(model[0].weight.detach().any())  # type: ignore[union-attr, operator]


# ------------------------------------------------------------------ why it differs


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * (1 + self.seen)


class CountingQuietly(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * (1 + self.calls)


class HandMade(nn.Module):
    """A BatchNorm that no type tells."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-5)


def mean_of_means(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.Loss(functional.cross_entropy(model(micro["x"]), micro["y"]), 1)


def sum_and_mean(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    logits = model(micro["x"])
    total = functional.cross_entropy(logits, micro["y"], reduction="sum")
    return wb.Loss(total + 5 * logits.square().mean(), len(logits))


def contrastive(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    z = model(micro["x"])
    return wb.Loss((z @ z.T).logsumexp(1).sum(), len(z))


def noisy(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"] + torch.randn_like(micro["x"])), micro["y"])


GENERATOR = torch.Generator()


def unseeded(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    noise = torch.randn(micro["x"].shape, generator=GENERATOR)
    return wb.cross_entropy(model(micro["x"] + noise), micro["y"])


def by_place(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    losses = functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
    return wb.Loss((losses * torch.arange(len(losses))).sum(), len(losses))


CAUSES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], str, tuple[str, ...]]] = {
    "batchnorm": (
        lambda: small(nn.BatchNorm1d(16)),
        loss,
        {"batchnorm": "allow"},
        "BatchNorm",
        ("1",),
    ),
    "coupled": (lambda: small(Centred()), loss, {}, "coupled samples", ("1",)),
    "hand-made": (lambda: small(nn.Tanh(), HandMade()), loss, {}, "coupled samples", ("2",)),
    "buffer": (lambda: small(Counting()), loss, {}, "a stateful module", ("1.seen",)),
    "counter": (
        lambda: small(CountingQuietly()),
        loss,
        {},
        "a stateful module",
        ("1.calls",),
    ),
    "sum and mean": (small, sum_and_mean, {}, "a loss that does not decompose", ()),
    "mean of means": (small, mean_of_means, {}, "mean of means", ()),
    "contrastive": (small, contrastive, {}, "a loss that does not decompose", ()),
    "noise": (small, noisy, {}, "randomness", ()),
    "unseeded": (small, unseeded, {}, "non-determinism", ()),
    "place": (small, by_place, {}, "order of the samples", ()),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named(name: str) -> None:
    make, function, options, kind, where = CAUSES[name]
    verdict = wb.verify(make(), function, samples(37, dtype=F32), micro_batch=5, **options)
    assert not verdict.same
    assert verdict.exit_status == 1
    assert verdict.line.startswith("DIFFERENT update: ")
    assert verdict.causes[0].name == kind, verdict
    assert verdict.causes[0].where == where
    assert kind in str(verdict)
    assert verdict.gradient.worst(1)[0].distance > 0.01


def test_dropout_is_switched_off_and_said() -> None:
    model = small(nn.Dropout(0.5))
    verdict = wb.verify(model, loss, samples(37, dtype=F32), micro_batch=5)
    assert verdict.same, verdict
    assert any("dropout in 1 is off in this proof" in note for note in verdict.notes)


def test_functional_dropout_is_switched_off_too() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, 0.5, self.training)

    model = small(Dropping())
    verdict = wb.verify(model, loss, samples(37, dtype=F32), micro_batch=5)
    assert verdict.same, verdict
    assert any("functional dropout is off" in note for note in verdict.notes)
    assert model.training


def test_a_buffer_that_no_gradient_shows_is_a_note() -> None:
    class Meter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("forwards", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.forwards += 1
            return x

    verdict = wb.verify(small(Meter()), loss, samples(37, dtype=F32), micro_batch=5)
    assert verdict.same
    assert any("1.forwards" in note for note in verdict.notes)


def test_a_wrong_parameter_is_found_among_right_ones() -> None:
    """One small gradient is wrong, far below the norm of all: the parameters are judged each."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, bias: Tensor, samples: int) -> Tensor:  # type: ignore[override]
            ctx.samples = samples
            return bias.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            return gradient * (1 + 1e-3 * ctx.samples), None

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            return x + Scaled.apply(self.bias, len(x)) * 1e-2

    verdict = wb.verify(small(Odd()), loss, samples(37, dtype=F32), micro_batch=5)
    assert not verdict.same
    assert [line.name for line in verdict.gradient.differing] == ["1.bias"]


# ---------------------------------------------------------------- memory and usage


def test_a_batch_that_does_not_fit_is_cut_down_and_said() -> None:
    def hungry(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        if len(micro["y"]) > 21:
            raise torch.OutOfMemoryError("out of memory")
        return loss(model, micro)

    verdict = wb.verify(mlp(dtype=F32), hungry, samples(64, dtype=F32), micro_batch=5)
    assert verdict.same
    assert verdict.samples == 16
    assert verdict.of_samples == 64
    assert f"the proof uses {verdict.samples}" in " ".join(verdict.notes)
    assert "(of 64: more do not fit undivided)" in verdict.line


def test_float64_that_does_not_fit_is_said() -> None:
    def wide(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        if micro["x"].dtype is torch.float64 and len(micro["y"]) > 9:
            raise torch.OutOfMemoryError("out of memory")
        return loss(model, micro)

    verdict = wb.verify(mlp(dtype=F32), wide, samples(30, dtype=F32), micro_batch=5)
    assert verdict.same
    assert "in float64 on 8 of 30 samples: more do not fit" in verdict.notes
    without = wb.verify(mlp(dtype=F32), loss, samples(30, dtype=F32), float64=False)
    assert without.float64 is None


def test_usage() -> None:
    with pytest.raises(wb.errors.OptionError, match="is the whole batch of 10 samples"):
        wb.verify(mlp(dtype=F32), loss, samples(10, dtype=F32), micro_batch=10)
    with pytest.raises(wb.errors.OptionError, match="a batch of one sample"):
        wb.verify(mlp(dtype=F32), loss, samples(1, dtype=F32))
    with pytest.raises(wb.errors.LossError, match="bare scalar"):
        wb.verify(mlp(dtype=F32), lambda m, b: m(b["x"]).sum(), samples(10, dtype=F32))
    model = mlp(dtype=F32)
    with pytest.raises(wb.errors.OptionError, match=r"must be one torch\.optim\.Optimizer"):
        wb.verify(model, loss, samples(10, dtype=F32), optimizer=[adamw(model)])  # type: ignore[arg-type]
    frozen = mlp(dtype=F32).requires_grad_(False)
    with pytest.raises(wb.errors.UnsupportedError, match="frozen"):
        wb.verify(frozen, loss, samples(10, dtype=F32))


def test_json_is_json() -> None:
    verdict = wb.verify(mlp(dtype=F32), loss, samples(12, dtype=F32), micro_batch=5)
    data = json.loads(verdict.to_json())
    assert data["same"] is True
    assert data["line"] == verdict.line
    assert {line["name"] for line in data["gradient"]["lines"]} >= {"0.weight", "4.bias"}
