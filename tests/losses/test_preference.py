"""Losses of preferences and distillation: over uneven splits, those of the undivided batch."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.losses.preferences import OURS, PLAIN, pairs, units_of
from tests.losses.problem import Policy
from tests.losses.test_policy import gradient
from tests.support import EXACT, Seen, Whole, distance, pieces, sgd

UNEVEN = (2, 1, 6)
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_update_is_that_of_the_undivided_batch(name: str, micro_batch: int) -> None:
    model, data = Policy(), pairs()
    whole = Whole(model, loss=PLAIN[name])
    value = whole.step(data)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(
        model, optimizer, loss=OURS[name], units=units_of(name), micro_batch=micro_batch
    )
    assert train.step(data).loss == pytest.approx(value, rel=1e-12)
    whole.assert_same(model, seen)


@pytest.mark.parametrize("name", OURS)
def test_a_stream_of_uneven_micro_batches(name: str) -> None:
    model, data = Policy(), pairs()
    whole = Whole(model, loss=PLAIN[name])
    whole.step(data)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=len(UNEVEN))
    if units_of(name) is not None:
        acc.announce(units_of(name)(data))
    parts = pieces(data, UNEVEN)
    if name == "kto":
        with pytest.raises(wb.errors.LossError, match="kto_loss"):
            acc.backward(OURS[name](model, parts[0]))
        return
    for micro in parts:
        acc.backward(OURS[name](model, micro))
    whole.assert_same(model, seen)


def test_kto_with_the_kl_of_a_pass_of_ones_own_is_a_sum_over_samples() -> None:
    model, data = Policy(), pairs()
    coupled: Any = OURS["kto"]
    every = coupled.encode(model, data)
    kl = every.pop("kl").mean()
    given: Any = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    whole = gradient(model, PLAIN["kto"](model, data))
    total = torch.zeros((), dtype=torch.float64)
    for micro in pieces(data, UNEVEN):
        part = coupled.encode(model, micro)
        loss = wb.losses.kto_loss(part["policy"], part["reference"], part["desirable"], kl, **given)
        total = total + loss.total
    assert distance(gradient(model, total / len(data["chosen"])), whole) <= EXACT


def test_what_is_not_one_number_per_pair_is_refused() -> None:
    one, two = torch.zeros(3, requires_grad=True), torch.zeros(2)
    for call in (
        lambda: wb.losses.dpo_loss(one, two, one, one),
        lambda: wb.losses.ipo_loss(one, one, two, one),
        lambda: wb.losses.simpo_loss(one, two),
        lambda: wb.losses.orpo_loss(one[None], one[None]),
        lambda: wb.losses.reward_loss(one, two),
    ):
        with pytest.raises(wb.errors.LossError, match="one number per pair"):
            call()
    with pytest.raises(wb.errors.LossError, match="one number per sample"):
        wb.losses.kto_loss(one, two, one, one)
    logits = torch.zeros(2, 3, 4, requires_grad=True)
    with pytest.raises(wb.errors.LossError, match=r"\[sequences, tokens, vocabulary\]"):
        wb.losses.distillation_loss(logits, logits, torch.ones(2, 2))
    with pytest.raises(wb.errors.OptionError, match=r"beta=1.5"):
        wb.losses.distillation_loss(logits, logits, torch.ones(2, 3), beta=1.5)
    with pytest.raises(wb.errors.OptionError, match="temperature=0"):
        wb.losses.distillation_loss(logits, logits, torch.ones(2, 3), temperature=0)


def test_the_odds_of_answers_that_are_nearly_certain() -> None:
    chosen = torch.tensor([-1e-12, -30.0], dtype=torch.float64, requires_grad=True)
    loss: Any = wb.losses.orpo_loss(chosen, torch.full((2,), -1.0, dtype=torch.float64), beta=1.0)
    assert torch.isfinite(torch.autograd.grad(loss.total, chosen)[0]).all()


# ------------------------------------------------------------------- beside TRL's own


@pytest.mark.slow
def test_orpo_and_simpo_are_those_of_trl() -> None:
    pytest.importorskip("trl")
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    chosen = torch.tensor([-0.3, -1.2, -2.0], requires_grad=True)
    rejected = torch.tensor([-0.5, -0.9, -4.0])
    device = types.SimpleNamespace(device="cpu")
    trainer: Any = types.SimpleNamespace(beta=0.4, accelerator=device)
    theirs = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
    ours: Any = wb.losses.orpo_loss(chosen, rejected, beta=0.4)
    assert (ours.total + chosen.sum()).item() == pytest.approx(-theirs.sum().item(), rel=1e-6)
    trainer = types.SimpleNamespace(
        beta=2.0, loss_type="simpo", simpo_gamma=0.7, label_smoothing=0, alpha=0, accelerator=device
    )
    theirs = CPOTrainer.cpo_loss(trainer, chosen, rejected)[0]
    ours = wb.losses.simpo_loss(chosen, rejected, beta=2.0, margin=0.7)
    assert ours.total.item() == pytest.approx(theirs.sum().item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_is_that_of_trl(beta: float) -> None:
    pytest.importorskip("trl")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    torch.manual_seed(0)
    student = torch.randn(2, 5, 7, requires_grad=True)
    teacher, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 2:] = -100
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, temperature=2.0)
    ours = wb.losses.distillation_loss(student, teacher, labels != -100, beta=beta, temperature=2.0)
    assert (ours.total / ours.units).item() == pytest.approx(theirs.item(), rel=1e-5)
