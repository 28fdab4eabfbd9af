"""Steps that measure: with room for the optimizer's state, and nothing left behind."""

from __future__ import annotations

from torch import Tensor, nn

import wholebatch as wb
from tests.support import adamw, mlp, samples, sgd, summed
from wholebatch.memory.predict import state_bytes
from wholebatch.memory.trial_step import state_pieces


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.Loss(summed(model, micro), len(micro["y"]))


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


def test_state_is_taken_in_as_many_pieces_as_an_optimizer_has() -> None:
    parameters = list(mlp().parameters())
    bytes_of = [parameter.nbytes for parameter in parameters]
    pieces = state_pieces(parameters, 2 * sum(bytes_of))
    assert [piece.numel() for piece in pieces] == [n for n in bytes_of for _ in range(2)]
