"""Losses of preferences: over uneven splits, those of the undivided batch."""

from __future__ import annotations

import pytest
import torch

import wholebatch as wb
from tests.losses.preferences import OURS, PLAIN, pairs
from tests.losses.problem import Policy
from tests.support import Seen, Whole, sgd

UNEVEN = (2, 1, 6)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_update_is_that_of_the_undivided_batch(name: str, micro_batch: int) -> None:
    model, data = Policy(), pairs()
    whole = Whole(model, loss=PLAIN[name])
    value = whole.step(data)
    optimizer = sgd(model)
    recorder = Seen(model, optimizer)
    train = wb.WholeBatch(model, optimizer, loss=OURS[name], micro_batch=micro_batch)
    assert train.step(data).loss == pytest.approx(value, rel=1e-12)
    whole.assert_same(model, recorder)


def test_what_is_not_one_number_per_pair_is_refused() -> None:
    three, shorter = torch.zeros(3, requires_grad=True), torch.zeros(2)
    with pytest.raises(wb.errors.LossError, match="one number per pair"):
        wb.losses.dpo_loss(three, shorter, three, three)
