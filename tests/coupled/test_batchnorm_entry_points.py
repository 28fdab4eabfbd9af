"""BatchNorm through the two ways in: exact in WholeBatch, refused or named in Accumulator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.support import Whole, loss, mean, samples, sgd, summed


def normed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.BatchNorm1d(12, momentum=None),
        nn.ReLU(),
        nn.Linear(12, 3),
    ).double()


def test_accumulator_refuses_by_name() -> None:
    model = normed()
    with pytest.raises(wb.errors.UnsupportedError, match=r"BatchNorm in '1', '4'"):
        wb.Accumulator(model, sgd(model), steps=2)
    with pytest.raises(wb.errors.OptionError, match="does not run the forward pass"):
        wb.Accumulator(model, sgd(model), steps=2, batchnorm="exact")
    acc = wb.Accumulator(model.eval(), sgd(model), steps=2)
    model.train()
    with pytest.raises(wb.errors.UnsupportedError, match=r"BatchNorm in '1', '4'"):
        acc.backward(summed(model, samples(4)), units=4)
    with pytest.raises(wb.errors.UnsupportedError, match=r"BatchNorm in '1', '4'"):
        next(acc.over([samples(4)]))


def test_freeze_is_exact_for_the_frozen_model() -> None:
    model = normed()
    optimizer = sgd(model)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=3, batchnorm="freeze")
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.__dict__.pop("forward", None)
            module.eval()
    whole = Whole(reference)
    mean(whole.model, samples(10)).backward()
    whole.optimizer.step()
    assert train.step(samples(10)).micro_batches == 4
    whole.assert_same(model)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("policy", ["exact", "allow"])
def test_a_window_without_an_update_leaves_the_running_statistics(
    policy: str, nonfinite: Any
) -> None:
    model = normed()
    train = wb.WholeBatch(
        model,
        sgd(model),
        loss=loss,
        micro_batch=4,
        batchnorm=policy,
        close=wb.Close(nonfinite=nonfinite),
    )
    train.step(samples(12))
    before = [buffer.clone() for buffer in model.buffers()]
    bad = {**samples(12), "x": samples(12)["x"] * torch.nan}
    if nonfinite == "skip":
        assert train.step(bad).skipped is not None
    else:
        with pytest.raises(wb.errors.NonFiniteError):
            train.step(bad)
    assert all(map(torch.equal, before, model.buffers()))
    train.step(samples(12))
    assert not any(map(torch.equal, before, model.buffers()))
