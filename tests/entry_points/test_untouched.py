"""Lines that a loop of one's own keeps by mistake: found, not trained with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import Whole, mean, mlp, pieces, samples, sgd, summed
from wholebatch.errors import WindowError

MICROS = pieces(samples(12), [5, 3, 4])
CHANGED_RATE = "the learning rate changed in the middle of a window"


def _freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).requires_grad_(False)


def _clear_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).grad = None


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (lambda m, o: o.zero_grad(), "remove zero_grad"),
        (lambda m, o: o.zero_grad(set_to_none=False), "remove zero_grad"),
        (lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1e-3), "clip_norm= clips"),
        (lambda m, o: mean(m, samples(4)).backward(), r"loss.backward\(\)"),
        (lambda m, o: o.step(), r"0.weight has changed .* remove optimizer.step\(\)"),
        (_freeze, "0.weight was frozen"),
        (_clear_one, "gradient of 0.weight has changed"),
        (lambda m, o: m[2].bias.grad.zero_(), "gradient of 2.bias has changed"),
    ],
    ids=["zero_grad", "zeroed", "clip", "backward", "step", "freeze", "one", "one zeroed"],
)
@pytest.mark.parametrize("at_flush", [False, True])
def test_a_line_of_the_old_loop_is_found(
    meddle: Callable[[nn.Module, torch.optim.Optimizer], None], message: str, at_flush: bool
) -> None:
    model = mlp()
    optimizer = sgd(model)
    acc = wb.Accumulator(model, optimizer, steps=3)
    acc.backward(summed(model, MICROS[0]), units=5)
    meddle(model, optimizer)
    with pytest.raises(WindowError, match=f"{message}.*discard.. drops what this window holds"):
        acc.flush() if at_flush else acc.backward(summed(model, MICROS[1]), units=3)
    acc.discard()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_is_cast_by_a_forward_is_refused() -> None:
    model = mlp(dtype=torch.float32)

    def cast(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        model.bfloat16()
        return inputs[0].bfloat16()

    model.register_forward_pre_hook(cast)
    acc = wb.Accumulator(model, sgd(model), steps=3, audit=False)
    with pytest.raises(WindowError, match=r"0.weight was cast to torch.bfloat16 after the window"):
        acc.backward(summed(model, MICROS[0]), units=5)


def _unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).requires_grad_(True)


def _add(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.new = nn.Linear(3, 3).double()
    optimizer.add_param_group({"params": model.new.parameters()})


def _hook(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].bias.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_unfreeze, "0.weight was unfrozen or added in the middle of the window"),
        (_add, "new.weight was unfrozen or added in the middle of the window"),
        (_hook, "a hook was added to a parameter in the middle of the window"),
    ],
    ids=["unfreeze", "add_param_group", "register_hook"],
)
def test_what_is_trained_must_not_change_in_a_window(
    change: Callable[[nn.Module, torch.optim.Optimizer], None], message: str
) -> None:
    """The micro-batches before the change have no gradient of the new parameter."""
    model = mlp()
    next(model.parameters()).requires_grad_(False)
    optimizer = sgd(model)
    acc = wb.Accumulator(model, optimizer, steps=3)
    acc.backward(summed(model, MICROS[0]), units=5)
    change(model, optimizer)
    acc.backward(summed(model, MICROS[1]), units=3)
    with pytest.raises(WindowError, match=message):
        acc.backward(summed(model, MICROS[2]), units=4)


def test_what_may_be_done_in_a_window() -> None:
    model = mlp()
    whole = Whole(model)
    whole.step(samples(12))
    acc = wb.Accumulator(model, sgd(model), steps=3)
    for micro in acc.over(MICROS):
        acc.backward(summed(model, micro), units=len(micro["y"]))
        torch.autograd.grad(mean(model, micro), list(model.parameters()))
        model.eval()
        with torch.no_grad():
            model(micro["x"])
        model.train()
    whole.assert_same(model)


def test_losses_that_lead_to_no_parameter_of_the_optimizer() -> None:
    model, another = mlp(), mlp()
    acc = wb.Accumulator(model, sgd(model), steps=1)
    with pytest.raises(WindowError, match="lead to none of the optimizer's parameters"):
        acc.backward(summed(another, MICROS[0]), units=5)


def test_a_layer_that_moves_with_every_forward_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Spectral normalisation iterates once per forward, and so once per micro-batch."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)))
    wb.Accumulator(model, sgd(model), steps=2)
    assert "0.parametrizations.weight.0 (_SpectralNorm): runs one power iteration" in caplog.text


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_schedule_in_the_loop_is_refused(rate: float | Tensor) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    acc = wb.Accumulator(model, optimizer, steps=3)

    def loop() -> None:
        for micro in acc.over(MICROS * 2):
            acc.backward(summed(model, micro), units=len(micro["y"]))
            optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.raises(WindowError, match=CHANGED_RATE):
        loop()
    acc.discard()


@pytest.mark.parametrize("meddle", ["zero_grad", "clip"])
def test_an_encoder_in_two_passes_leaves_the_window_alone(meddle: str) -> None:
    model = mlp()
    optimizer = sgd(model)

    def encode(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
        if meddle == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        else:
            optimizer.zero_grad()
        logits: Tensor = model(micro["x"])
        return logits

    train = wb.WholeBatch(
        model, optimizer, loss=wb.Coupled(encode, lambda z: wb.losses.info_nce(z, z)), micro_batch=4
    )
    with pytest.raises(WindowError, match=r"gradient of 0.weight has changed"):
        train.step(samples(10))
