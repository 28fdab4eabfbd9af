"""A prediction is what the meter counts in a real run, to the byte, and touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.memory.models import CASES, GPT, Case, loss, mlp, tokens, vectors
from wholebatch.errors import LossError, UnsupportedError
from wholebatch.losses.loss import Loss, cross_entropy
from wholebatch.memory import MemoryMeter, predict_peak
from wholebatch.memory.plain_window import PlainWindow

# Linear layers in bf16 on a CPU without bf16 instructions say once that they will be slow.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,  # makes its state in the constructor
}


def measured(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    micro: Any,
    *,
    precision: str,
    micro_batches: int = 3,
) -> MemoryMeter:
    """A real run: some windows, the last of them metered."""
    with MemoryMeter(model=model, optimizer=optimizer) as meter:
        window = PlainWindow(model, loss, optimizer=optimizer, precision=precision)
        if optimizer is not None:
            window.run([micro])
            meter.reset_peak()
        window.run([micro] * micro_batches)
    return meter


# Every model with one optimizer; in bf16 where that is quick. Every optimizer on the smallest.
RUNS = [(name, "adamw", "full") for name in CASES]
RUNS += [(name, "adamw", "bf16") for name in ("mlp", "gpt-tied")]
RUNS += [("mlp", kind, "full") for kind in OPTIMIZERS]


@pytest.mark.parametrize("name, kind, precision", sorted(set(RUNS)))
def test_equals_a_real_run_to_the_byte(name: str, kind: str, precision: str) -> None:
    case: Case = CASES[name]
    model = case.make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    micro = case.batch(3)
    predicted = predict_peak(model, loss, micro, optimizer=optimizer, precision=precision)
    meter = measured(model, optimizer, micro, precision=precision)
    assert predicted.peak == meter.peak
    assert predicted.by_category == meter.peak_by_category


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn"])
def test_equals_a_real_run_with_16_bit_parameters(name: str) -> None:
    case = CASES[name]
    model = case.make().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    micro = {k: v.bfloat16() if v.is_floating_point() else v for k, v in case.batch(3).items()}
    predicted = predict_peak(model, loss, micro, optimizer=optimizer)
    meter = measured(model, optimizer, micro, precision="full")
    assert (predicted.peak, predicted.by_category) == (meter.peak, meter.peak_by_category)
    # Gradients of 16-bit parameters are added in fp32: twice the bytes of the parameters.
    assert predicted.by_category["gradients"] == 2 * predicted.by_category["parameters"]


def test_frozen_and_unused_parameters_have_no_gradient_and_no_state() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(20, 5)
            self.unused = nn.Linear(500, 500)
            self.frozen = nn.Linear(20, 20)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.used(self.frozen(x))
            return result

    model = Partly()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    predicted = predict_peak(model, loss, vectors(4), optimizer=optimizer)
    meter = measured(model, optimizer, vectors(4), precision="full")
    assert predicted.by_category == meter.peak_by_category
    assert predicted.by_category["gradients"] == 105 * 4


def test_a_model_in_the_middle_of_its_training() -> None:
    model, micro = mlp(), vectors(4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step
    PlainWindow(model, loss, optimizer=optimizer).run([micro])
    scheduler.step()
    loss(model, micro).total.backward()
    before = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    random = torch.get_rng_state()
    state = {key: dict(value) for key, value in optimizer.state.items()}

    predicted = predict_peak(model, loss, micro, optimizer=optimizer)

    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(random, torch.get_rng_state())
    for key, value in optimizer.state.items():
        assert all(value[name] is state[key][name] for name in value)
    optimizer.zero_grad()
    fresh = mlp()
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    meter = measured(fresh, fresh_optimizer, micro, precision="full")
    assert predicted.peak == meter.peak


def test_a_model_without_bytes() -> None:
    with torch.device("meta"):
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    real = GPT()
    expected = predict_peak(real, loss, tokens(3), optimizer=torch.optim.AdamW(real.parameters()))
    predicted = predict_peak(model, loss, tokens(3), optimizer=optimizer)
    assert (predicted.peak, predicted.by_category) == (expected.peak, expected.by_category)
    assert all(p.is_meta for p in model.parameters())


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Sample:
    pair: Pair
    name: str


def test_nested_batches_and_constants_in_closures() -> None:
    weight = torch.rand(5)

    def nested_loss(model: nn.Module, micro: Sample) -> Loss:
        return cross_entropy(model(micro.pair.x), micro.pair.y, weight=weight)

    batch = Sample(Pair(*vectors(4).values()), "a")
    predicted = predict_peak(mlp(), nested_loss, batch)
    assert predicted.by_category["inputs"] == 4 * 20 * 4 + 4 * 8 + 5 * 4


def test_says_why_a_loss_cannot_be_predicted() -> None:
    def reads(model: nn.Module, micro: dict[str, torch.Tensor]) -> Loss:
        total = model(micro["x"]).sum()
        return Loss(total * 2 if total.item() > 0 else total, 1)

    def masks(model: nn.Module, micro: dict[str, torch.Tensor]) -> Loss:
        return Loss(model(micro["x"])[micro["y"] > 2].sum(), 1)

    model = mlp()
    with pytest.raises(UnsupportedError, match=r"local_scalar_dense.*reads the values of a"):
        predict_peak(model, reads, vectors(4))
    with pytest.raises(UnsupportedError, match=r"nonzero.*give the micro-batch size as a number"):
        predict_peak(model, masks, vectors(4))


def test_refuses_a_loss_that_goes_past_its_argument() -> None:
    model = mlp()

    def closure(_: nn.Module, micro: dict[str, torch.Tensor]) -> Loss:
        return loss(model, micro)

    with pytest.raises(UnsupportedError, match="uses another model object"):
        predict_peak(model, closure, vectors(4))
    assert all(p.grad is None for p in model.parameters())


def test_a_gpu_that_is_not_there_counts_in_its_blocks() -> None:
    if torch.cuda.is_available():
        pytest.skip("predicts for a GPU that is not there, and this machine has one")
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    predicted = predict_peak(model, loss, vectors(4), optimizer=optimizer, device="cuda")
    assert predicted.peak % 512 == 0
    assert predicted.peak > predict_peak(model, loss, vectors(4), optimizer=optimizer).peak


def test_losses_of_several_terms_and_of_single_units() -> None:
    def terms(model: nn.Module, micro: dict[str, torch.Tensor]) -> Any:
        logits = model(micro["x"])
        return Loss.terms({"a": (logits.sum(), 1), "b": (logits.square().sum(), 2, 0.5)})

    def units(model: nn.Module, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")

    model = mlp()
    assert predict_peak(model, terms, vectors(4)).peak > 0
    assert predict_peak(model, units, vectors(4)).peak > 0
    with pytest.raises(LossError, match="bare scalar"):
        predict_peak(model, lambda m, b: m(b["x"]).mean(), vectors(4))
