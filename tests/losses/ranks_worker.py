"""Run under torchrun: every named mean and preference loss over two ranks with uneven data."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.losses.preferences import OURS, PLAIN, pairs
from tests.losses.problem import MEANS, Batch, Policy, batch, ours, undivided
from tests.losses.test_policy import gradient, terms, terms_by_hand, units
from tests.support import Seen, distance, pieces, sgd

SIZES = {12: ([5, 1, 2], [1, 3]), 9: ([2, 1], [3, 2, 1])}
"""The micro-batches of rank 0 and of rank 1; together the whole batch."""


def shares(data: Batch) -> list[list[Batch]]:
    """The micro-batches of each rank."""
    first, second = SIZES[len(next(iter(data.values())))]
    parts = pieces(data, [*first, *second])
    return [parts[: len(first)], parts[len(first) :]]


def found(model: nn.Module, run: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> list[Tensor]:
    """The gradients of one update of a DDP replica."""
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    run(replica, optimizer)
    return seen.gradients[0]


def in_a_stream(loss: Any, micros: list[Batch], counted: Any = None) -> Callable[..., None]:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        acc = wb.Accumulator(model, optimizer, steps=3)
        for micro in acc.over(micros):
            if counted is not None and acc.micro_batches == 0:
                acc.announce(counted)
            acc.backward(loss(model, micro))

    return run


def summed(counts: list[dict[str, Any]]) -> dict[str, float]:
    return {name: sum(float(count[name]) for count in counts) for name in counts[0]}


def errors(loss: Any, plain: Any, data: Batch, units: Any = None) -> tuple[float, float]:
    """How far off we are, and how far off the mean of all ranks' micro-batch means is."""
    rank, every = dist.get_rank(), shares(data)
    right = gradient(model := Policy(), plain(model, data))
    mine = every[rank]
    counted = units and summed([units(micro) for micro in mine])
    run = in_a_stream(loss, mine, counted)
    exact = distance(found(Policy(), run), right)
    model = Policy()
    means = [plain(model, micro) / len(micros) / 2 for micros in every for micro in micros]
    return exact, distance(gradient(model, torch.stack(means).sum()), right)


def out_of_data() -> float:
    """Rank 1 has data for the first window only; rank 0 goes on with announced windows."""
    first, second = shares(batch())
    micros = [*first, *first] if dist.get_rank() == 0 else second

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        acc = wb.Accumulator(model, optimizer, steps=3)
        for place, micro in enumerate(acc.over(micros)):
            if acc.micro_batches == 0:
                acc.announce(summed([units(one) for one in micros[place : place + 3]]))
            acc.backward(terms(model, micro))

    model = Policy()
    found(model, run)
    reference = Policy()
    optimizer = sgd(reference)
    whole = batch()
    left = {name: torch.cat([micro[name] for micro in first]) for name in whole}
    for data in (whole, left):
        every = terms(reference, data).by_name.values()
        sum(term.weight * term.total / term.units for term in every).backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(model.parameters(), reference.parameters())


def main() -> None:
    dist.init_process_group("gloo")
    report: dict[str, Any] = {mean: errors(ours(mean), undivided(mean), batch()) for mean in MEANS}
    report["terms"] = errors(terms, terms_by_hand, batch(), units)
    report["out of data"] = out_of_data()
    for name, loss in OURS.items():
        report[name] = errors(loss, PLAIN[name], pairs())
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(report, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
