"""Steps that measure: with room for the optimizer's state, and nothing left behind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import adamw, mlp, samples, sgd, summed
from wholebatch.memory.predict import state_bytes
from wholebatch.memory.trial_step import TrialSteps, held_bytes


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.Loss(summed(model, micro), len(micro["y"]))


def trial(budget: int, missing: int = 0) -> TrialSteps:
    model = mlp()
    return TrialSteps(model, loss, adamw(model), "full", budget, missing)


def test_the_state_of_the_first_update_is_known_before_it() -> None:
    model = mlp()
    optimizer = adamw(model)
    expected = state_bytes(model, optimizer)
    assert not optimizer.state
    summed(model, samples(4)).backward()
    optimizer.step()
    steps = 4 * len(list(model.parameters()))  # their counts of steps
    made = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert expected == made == 2 * sum(p.nbytes for p in model.parameters()) + steps
    assert state_bytes(model, sgd(model)) == 0


def test_a_step_that_does_not_fit_is_none() -> None:
    free = trial(10**9)
    used = free.peak(samples(8))
    assert used is not None
    assert used > held_bytes(free.model)
    assert trial(used).peak(samples(8)) == used
    assert trial(used // 2).peak(samples(8)) is None
    assert trial(used, missing=used // 2).peak(samples(8)) is None
    assert free.peak(samples(8)) == used  # nothing is left behind
    assert all(parameter.grad is None for parameter in free.model.parameters())


def test_state_is_taken_in_as_many_pieces_as_an_optimizer_has() -> None:
    bytes_of = [parameter.nbytes for parameter in mlp().parameters()]
    one = trial(10**9, missing=2 * sum(bytes_of))
    one._take_state()
    assert [piece.numel() for piece in one._state] == [n for n in bytes_of for _ in range(2)]
    assert isinstance(one._state[0], torch.Tensor)
