"""Run under torchrun: ranks that train other parameters, or begin with other weights."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.support import distance, mean, mlp, pieces, samples, sgd

SIZES = (4, 1, 5, 3)


def wrapped(model: nn.Module | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(mlp() if model is None else model)


def rest_of(model: nn.Module, left_out: str) -> torch.optim.Optimizer:
    parameters = [p for name, p in model.named_parameters() if name != left_out]
    return torch.optim.SGD(parameters, lr=0.1)


def frozen(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped()
    model.module[0].weight.requires_grad_(rank == 0)
    return model, sgd(model)


def not_in_the_optimizer(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped()
    return model, rest_of(model, "module.2.bias" if rank == 0 else "")


def other_order(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped()
    parameters = list(model.parameters())
    return model, torch.optim.SGD(parameters if rank == 0 else parameters[::-1], lr=0.1)


def equal_sizes(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Each rank freezes another layer of the same shape: the sums would have the same length."""
    model = wrapped(nn.Sequential(*(nn.Linear(5, 5) for _ in range(2)), nn.Linear(5, 3)).double())
    model.module[rank].requires_grad_(False)
    return model, sgd(model)


def loaded_on_one(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped()
    with torch.no_grad():
        model.module[2].bias[1] += rank
    return model, sgd(model)


def beside_the_model(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A trained parameter that is not in the wrapped model, so that nobody has copied it."""
    model = wrapped()
    scale = nn.Parameter(torch.full((), 1.0 + rank, dtype=torch.float64))
    return model, torch.optim.SGD([*model.parameters(), scale], lr=0.1)


def left_out_by_ddp(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    inner = mlp()
    inner._ddp_params_and_buffers_to_ignore = ["2.weight"]  # type: ignore[assignment]
    model = wrapped(inner)
    return model, sgd(model)


def in_a_loop(model: Any, optimizer: Any, batch: Any) -> None:
    acc = wb.Accumulator(model, optimizer, steps=len(SIZES))
    for micro in acc.over(pieces(batch, SIZES)):
        acc.backward(mean=mean(model, micro), units=len(micro["y"]))


def of_the_whole(model: Any, optimizer: Any, batch: Any) -> None:
    def loss(model: Any, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4).step(batch)


def counted_before(model: Any, optimizer: Any, batch: Any) -> None:
    def loss(model: Any, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    count: Any = lambda micro: len(micro["y"])  # noqa: E731
    wb.WholeBatch(model, optimizer, loss=loss, micro_batch=3, units=count).step(batch)


def refused(make: Callable[[int], Any], train: Callable[..., None]) -> str:
    model, optimizer = make(dist.get_rank())
    before = [p.detach().clone() for p in model.parameters()]
    batch = {name: leaf[dist.get_rank() :] for name, leaf in samples(15).items()}
    try:
        train(model, optimizer, {name: leaf[:13] for name, leaf in batch.items()})
    except wb.errors.WholebatchError as error:
        assert all(map(torch.equal, before, model.parameters()))
        return f"{type(error).__name__}: {error}"
    return "nothing"


def resumed(rank: int) -> list[str]:
    """Go on with a saved run, with other weights on rank 2."""
    told = []
    model = wrapped()
    optimizer = sgd(model)
    acc = wb.Accumulator(model, optimizer, steps=2)
    first, second = pieces(samples(9), (5, 4))
    for micro in (first, second):
        acc.backward(mean=mean(model, micro), units=len(micro["y"]))
    saved = acc.state_dict()
    with torch.no_grad():
        model.module[0].bias += rank == 2
    again = wb.Accumulator(model, optimizer, steps=2)
    again.load_state_dict(saved)
    try:
        again.backward(mean=mean(model, second), units=4)
    except wb.errors.RankError as error:
        told.append(str(error))
    again.discard()
    return told


def layers_alike_and_frozen_alike() -> float:
    """What all ranks freeze alike, and in an order of their own, trains as the global batch."""
    model, other, batch = wrapped(), mlp(), samples(13)
    for one in (model.module, other):
        one[0].weight.requires_grad_(False)
    own = (slice(0, 7), slice(7, 8), slice(8, None))[dist.get_rank()]
    order = [*model.parameters()][::-1]
    optimizer = torch.optim.SGD(order, lr=0.1)
    of_the_whole(model, optimizer, {name: leaf[own] for name, leaf in batch.items()})
    mean(other, batch).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    return distance(model.parameters(), other.parameters())


CASES = (
    frozen,
    not_in_the_optimizer,
    other_order,
    equal_sizes,
    loaded_on_one,
    beside_the_model,
    left_out_by_ddp,
)

if __name__ == "__main__":
    faulthandler.dump_traceback_later(220, exit=True)
    dist.init_process_group("gloo")
    report: dict[str, Any] = {
        f"{make.__name__}, {train.__name__}": refused(make, train)
        for make in CASES
        for train in (in_a_loop, of_the_whole, counted_before)
    }
    report["exact"] = layers_alike_and_frozen_alike()
    report["resumed"] = resumed(dist.get_rank())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, report)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(gathered, file)
    dist.destroy_process_group()
