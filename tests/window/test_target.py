"""What is supported works exactly; what is not is refused by name, before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.support import EXACT, Whole, distance, grouped, mlp, pieces, samples, sgd, summed


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


@pytest.mark.parametrize("clip", [None, 0.05])
def test_sparse_gradients(clip: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 1)).double()
    x = torch.randint(0, 20, (13, 3))
    whole = Whole(model, loss=lambda m, batch: m(batch).square().mean(), clip_norm=None)
    optimizer = whole.optimizer
    whole.loss(whole.model, x).backward()
    if clip is not None:
        norm = (
            sum(
                float(p.grad.coalesce().to_dense().square().sum())
                if p.grad.is_sparse
                else float(p.grad.square().sum())
                for p in whole.model.parameters()
                if p.grad is not None
            )
            ** 0.5
        )
        for p in whole.model.parameters():
            assert p.grad is not None
            p.grad.mul_(min(1.0, clip / (norm + 1e-6)))
    optimizer.step()
    acc = wb.Accumulator(model, sgd(model), steps=3, clip_norm=clip)
    for micro in acc.over(x.split([1, 8, 4])):
        acc.backward(model(micro).square().sum(), units=len(micro))
    whole.assert_same(model)


def test_sparse_adam() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(20, 4, sparse=True).double()
    x = torch.randint(0, 20, (13,))
    make = lambda m: torch.optim.SparseAdam(list(m.parameters()), lr=0.1)  # noqa: E731
    whole = Whole(model, make, loss=lambda m, batch: m(batch).square().mean(1).mean())
    whole.step(x)
    acc = wb.Accumulator(model, make(model), steps=3)
    for micro in acc.over(x.split([1, 8, 4])):
        acc.backward(model(micro).square().mean(1).sum(), units=len(micro))
    whole.assert_same(model)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(torch.complex128)
    x = torch.randn(9, 4, dtype=torch.complex128)
    whole = Whole(model, loss=lambda m, batch: m(batch).abs().square().mean(), clip_norm=0.1)
    whole.step(x)
    acc = wb.Accumulator(model, sgd(model), steps=2, clip_norm=0.1)
    for micro in acc.over(x.split([2, 7])):
        acc.backward(model(micro).abs().square().sum(), units=2 * len(micro))
    ours = [
        torch.view_as_real(p - q)
        for p, q in zip(model.parameters(), whole.start.parameters(), strict=True)
    ]
    theirs = [torch.view_as_real(update) for update in whole.updates()]
    assert distance(ours, theirs) <= EXACT
    refused(model, sgd(model), "complex number has no order", clip_value=1.0)


@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, whole_batch: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = mlp()[0], mlp()[1:]  # type: ignore[index]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.rest, self.first(x), use_reentrant=reentrant)  # type: ignore[no-untyped-call]
            return out

    model, batch = Checkpointed(), samples(10)
    whole = Whole(model)
    whole.step(batch)
    loss = lambda m, b: wb.cross_entropy(m(b["x"]), b["y"])  # noqa: E731
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=3)
    if reentrant:
        with pytest.raises(wb.errors.UnsupportedError, match="pass use_reentrant=False"):
            if whole_batch:
                train.step(batch)
            else:
                accumulate(model, sgd(model), batch, [6, 1, 3])
        return
    if whole_batch:
        train.step(batch)
    else:
        accumulate(model, sgd(model), batch, [6, 1, 3])
    whole.assert_same(model)


@pytest.mark.slow
def test_a_compiled_model() -> None:
    model, batch = mlp(), samples(10)
    whole = Whole(model)
    whole.step(batch)
    compiled: Any = torch.compile(model, backend="aot_eager")
    accumulate(compiled, sgd(compiled), batch, [6, 1, 3])
    whole.assert_same(model)
