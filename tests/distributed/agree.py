"""Ranks that train other parameters, or begin with other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.problem import outcome
from tests.support import distance, loss, mean, mlp, pieces, samples, sgd

SIZES = (4, 1, 5, 3)
Pair = tuple[Any, torch.optim.Optimizer]


def wrapped(model: nn.Module | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(mlp() if model is None else model)


def frozen(rank: int) -> Pair:
    model = wrapped()
    model.module[0].weight.requires_grad_(rank == 0)
    return model, sgd(model)


def other_order(rank: int) -> Pair:
    model = wrapped()
    parameters = list(model.parameters())
    return model, torch.optim.SGD(parameters if rank == 0 else parameters[::-1], lr=0.1)


def other_rate(rank: int) -> Pair:
    """A scheduler of each rank's own loss."""
    model = wrapped()
    return model, torch.optim.SGD(model.parameters(), lr=0.1 + rank)


def loaded_on_one(rank: int) -> Pair:
    model = wrapped()
    with torch.no_grad():
        model.module[2].bias[1] += rank
    return model, sgd(model)


def beside_the_model(rank: int) -> Pair:
    """A trained parameter that is not in the wrapped model, so that nobody has copied it."""
    model = wrapped()
    scale = nn.Parameter(torch.full((), 1.0 + rank, dtype=torch.float64))
    return model, torch.optim.SGD([*model.parameters(), scale], lr=0.1)


def left_out_by_ddp(rank: int) -> Pair:
    inner = mlp()
    inner._ddp_params_and_buffers_to_ignore = ["2.weight"]  # type: ignore[assignment]
    model = wrapped(inner)
    return model, sgd(model)


def in_a_loop(model: Any, optimizer: Any, batch: Any) -> None:
    acc = wb.Accumulator(model, optimizer, steps=len(SIZES))
    for micro in acc.over(pieces(batch, SIZES)):
        acc.backward(mean=mean(model, micro), units=len(micro["y"]))


def of_the_whole(model: Any, optimizer: Any, batch: Any, **options: Any) -> None:
    wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, **options).step(batch)


def refused(make: Callable[[int], Pair], train: Callable[..., None]) -> str:
    model, optimizer = make(dist.get_rank())
    before = [p.detach().clone() for p in model.parameters()]
    batch = pieces(samples(15), [1, 13, 1])[1]
    told = outcome(lambda: train(model, optimizer, batch))
    assert all(map(torch.equal, before, model.parameters()))
    return told


def noise_of_ones_own() -> str:
    """Each rank draws its own noise in `on_gradient=`: their models would drift apart."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def noise(named: list[tuple[str, nn.Parameter]]) -> None:
        for _, parameter in named:
            assert parameter.grad is not None
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad.add_(drawn, alpha=1e-3)

    def train(*given: Any) -> None:
        of_the_whole(*given, close=wb.Close(on_gradient=noise))

    return refused(lambda rank: (model := wrapped(), sgd(model)), train)


def resumed() -> str:
    """Go on with a saved run, with other weights on rank 1."""
    model = wrapped()
    optimizer = sgd(model)
    acc = wb.Accumulator(model, optimizer, steps=2)
    first, second = pieces(samples(9), (5, 4))
    for micro in (first, second):
        acc.backward(mean=mean(model, micro), units=len(micro["y"]))
    saved = acc.state_dict()
    with torch.no_grad():
        model.module[0].bias += dist.get_rank()
    again = wb.Accumulator(model, optimizer, steps=2)
    again.load_state_dict(saved)
    told = outcome(lambda: again.backward(mean=mean(model, second), units=4))
    again.discard()
    return told


def frozen_and_ordered_alike() -> float:
    """What all ranks freeze alike, and in an order of their own, trains as the global batch."""
    model, other, batch = wrapped(), mlp(), samples(13)
    for each in (model.module, other):
        each[0].weight.requires_grad_(False)
    own = pieces(batch, [9, 4])[dist.get_rank()]
    of_the_whole(model, torch.optim.SGD([*model.parameters()][::-1], lr=0.1), own)
    mean(other, batch).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    return distance(model.parameters(), other.parameters())


CASES = (frozen, other_order, other_rate, loaded_on_one, beside_the_model, left_out_by_ddp)


def report() -> dict[str, Any]:
    return {
        "refused": {
            make.__name__: [refused(make, train) for train in (in_a_loop, of_the_whole)]
            for make in CASES
        },
        "noise": noise_of_ones_own(),
        "resumed": resumed(),
        "off": frozen_and_ordered_alike(),
    }
