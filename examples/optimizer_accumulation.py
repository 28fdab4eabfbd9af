"""Optimizer accumulation of torch-optimi beside an exact window: gradients held, and the update.

    pip install torch-optimi
    python examples/optimizer_accumulation.py

torch-optimi steps inside the backward: each gradient goes into Adam's moments as soon as it is
there, and is released. So few gradients are held at once. The update is an approximation: the
moments see every micro-batch as a step of its own, and the weights move once per window.
`wb.WholeBatch` keeps the gradients of a window, and makes the update of the undivided batch, with
the same optimizer. It refuses hooks that step inside the backward.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import wholebatch as wb

Batch = dict[str, Tensor]
WORDS, MICRO, UPDATES = 48, 8, 5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, WORDS)
    ).double()


def words(number: int = 64) -> Batch:
    x = torch.randint(0, WORDS, (number,), generator=torch.Generator().manual_seed(1))
    return {"x": x, "y": (7 * x + 3) % WORDS}


def optimizer_of(model: nn.Module, *, gradient_release: bool = False) -> Any:
    from optimi import AdamW

    return AdamW(model.parameters(), lr=0.003, gradient_release=gradient_release)


class GradientPeak:
    """The most MiB of gradients that a model held at once."""

    def __init__(self, model: nn.Module) -> None:
        self.mib = 0.0
        self._model = model

    def count(self, _: object = None) -> None:
        held = (p.grad.nbytes for p in self._model.parameters() if p.grad is not None)
        self.mib = max(self.mib, sum(held) / 2**20)


def undivided(model: nn.Module, batch: Batch, peak: GradientPeak) -> None:
    optimizer = optimizer_of(model)
    for _ in range(UPDATES):
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        peak.count()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_in_the_optimizer(model: nn.Module, batch: Batch, peak: GradientPeak) -> None:
    from optimi import prepare_for_gradient_release

    optimizer = optimizer_of(model, gradient_release=True)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(peak.count)
    prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True)
    micros = wb.split(batch, MICRO)
    for _ in range(UPDATES):
        for number, micro in enumerate(micros, 1):
            optimizer.optimizer_accumulation = number < len(micros)
            F.cross_entropy(model(micro["x"]), micro["y"]).backward()  # It steps in here.


def in_a_window(model: nn.Module, batch: Batch, peak: GradientPeak) -> None:
    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    close = wb.Close(on_gradient=peak.count)
    train = wb.WholeBatch(
        model, optimizer_of(model), loss=loss, micro_batch=MICRO, close=close, execute="eager"
    )
    for _ in range(UPDATES):
        train.step(batch)


def main() -> dict[str, tuple[float, float]]:
    """Return for each way its distance from the undivided batch, and MiB of gradients."""
    start, batch = network(), words()
    ways = {
        "undivided": undivided,
        "optimizer accumulation": accumulated_in_the_optimizer,
        "wb.WholeBatch": in_a_window,
    }
    found: dict[str, tuple[float, float]] = {}
    right: Tensor | None = None
    for name, train in ways.items():
        model = copy.deepcopy(start)
        peak = GradientPeak(model)
        train(model, batch, peak)
        with torch.no_grad():
            moved = parameters_to_vector(model.parameters())
            moved = moved - parameters_to_vector(start.parameters())
        right = moved if right is None else right
        found[name] = float((moved - right).norm() / right.norm()), peak.mib
    (theirs, little), (ours, all_of_them) = found["optimizer accumulation"], found["wb.WholeBatch"]
    print(
        f"Shown: after {UPDATES} updates the change of the weights is off by {theirs:.0%} with "
        f"optimizer accumulation, which holds {little:.2f} MiB of gradients; by {ours:.0e} with "
        f"wb.WholeBatch, which holds {all_of_them:.2f} MiB."
    )
    return found


if __name__ == "__main__":
    main()
