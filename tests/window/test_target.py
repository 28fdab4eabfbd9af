"""What is supported works exactly; what is not is refused by name, before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.support import grouped, mlp, pieces, samples, sgd, summed


def accumulate(model: nn.Module, optimizer: Any, batch: Any, sizes: list[int]) -> None:
    acc = wb.Accumulator(model, optimizer, steps=len(sizes))
    for micro in acc.over(pieces(batch, sizes)):
        acc.backward(summed(model, micro), units=len(micro["y"]))
    assert acc.updates == 1


def refused(model: nn.Module, optimizer: Any, message: str, **options: Any) -> None:
    for make in (
        lambda: wb.Accumulator(model, optimizer, steps=2, **grouped(options)),
        lambda: wb.WholeBatch(model, optimizer, loss=summed, **grouped(options)),
    ):
        with pytest.raises((wb.errors.UnsupportedError, wb.errors.OptionError), match=message):
            make()


def test_closures_are_refused() -> None:
    model = mlp()
    refused(model, torch.optim.LBFGS(model.parameters()), "LBFGS needs a closure")


def test_post_accumulate_hooks_are_refused_by_name() -> None:
    model = mlp()
    model[2].weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[index]
    refused(model, sgd(model), r"2\.weight has a post-accumulate-grad hook")


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    model = mlp()
    refused(model, "adam", "optimizer=str: must be a torch.optim.Optimizer or a list")
    refused(model, [], "optimizer=list: must be")
    refused(model, [sgd(model), 3], "optimizer holds int")
    refused(model, [sgd(model), sgd(model)], r"0\.weight is in two optimizers")
    with pytest.raises(wb.errors.OptionError, match="model=list"):
        wb.Accumulator([], sgd(model), steps=1)


def test_everything_frozen_is_refused() -> None:
    model = mlp().requires_grad_(False)
    refused(model, sgd(model), "every parameter of the optimizer is frozen")


def test_a_model_without_values_is_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    refused(model, sgd(model), "meta device have no values")


def test_schedulers_and_averages_are_checked() -> None:
    model, other = mlp(), mlp()
    stranger = torch.optim.lr_scheduler.StepLR(sgd(other), 1)
    refused(model, sgd(model), "belongs to an optimizer that is not among", scheduler=stranger)
    refused(model, sgd(model), r"scheduler=int: must have step\(\)", scheduler=3)
    steps = torch.optim.lr_scheduler.StepLR
    refused(model, sgd(model), "scheduler=the class StepLR: must have step", scheduler=steps)
    refused(model, sgd(model), "ema=Linear: must have update_parameters", ema=nn.Linear(1, 1))


def test_engines_that_are_not_supported_yet_are_refused_by_name() -> None:
    class FullyShardedDataParallel(nn.Linear):
        __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    model = FullyShardedDataParallel(2, 2)
    refused(model, sgd(model), "wrapped in FullyShardedDataParallel: supported are plain modules")


def test_a_parameter_outside_the_optimizer_gets_no_gradient() -> None:
    model, batch = mlp(), samples(6)
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)  # type: ignore[index]
    accumulate(model, optimizer, batch, [4, 2])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_parameter_without_gradient_stays_out_of_the_step() -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.Linear(5, 3)}).double()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    before = model["unused"].weight.detach().clone()
    acc = wb.Accumulator(model, optimizer, steps=2)
    for micro in acc.over(pieces(samples(4), [3, 1])):
        acc.backward(summed(model["used"], micro), units=len(micro["y"]))
    assert torch.equal(model["unused"].weight, before)  # not even decayed, as for the whole batch
