"""Muon for the hidden matrices and AdamW for the rest: two optimizers, one window.

    python examples/muon.py

Muon makes the gradient of a matrix orthogonal, so the length of the gradient does not matter and
its direction is all that does. A mean of means has another direction. `wb.WholeBatch` takes a
list of optimizers and steps each once per window. Needs a torch that has `torch.optim.Muon` (2.9).
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import wholebatch as wb

Batch = dict[str, Tensor]
WORDS, MICRO = 48, 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, 32),
        nn.Linear(32, 64, bias=False),
        nn.GELU(),
        nn.Linear(64, 32, bias=False),
        nn.LayerNorm(32),
        nn.Linear(32, WORDS),
    ).double()


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    hidden = [model[1].weight, model[3].weight]
    rest = [p for p in model.parameters() if all(p is not one for one in hidden)]
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=0.003)]


def sentences(number: int = 30) -> Batch:
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, WORDS, (number, 12), generator=draw)
    lengths = torch.randint(1, 13, (number, 1), generator=draw)
    return {"x": x, "y": ((7 * x + 3) % WORDS).masked_fill(torch.arange(12) >= lengths, -100)}


def before(model: nn.Module, batch: Batch, micro_batch: int = MICRO) -> None:
    micros = wb.split(batch, micro_batch)
    steppers = optimizers(model)
    for micro in micros:
        mean = F.cross_entropy(model(micro["x"]).flatten(0, 1), micro["y"].flatten())
        (mean / len(micros)).backward()
    for optimizer in steppers:
        optimizer.step()
        optimizer.zero_grad()


def undivided(model: nn.Module, batch: Batch) -> None:
    before(model, batch, micro_batch=len(batch["x"]))


def after(model: nn.Module, batch: Batch) -> None:
    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    wb.WholeBatch(model, optimizers(model), loss=loss, micro_batch=MICRO).step(batch)


def matrices(model: nn.Module) -> Tensor:
    return parameters_to_vector([model[1].weight, model[3].weight]).detach()


def main() -> dict[str, float]:
    # Muon computes in bfloat16; torch warns where a CPU has no instructions for it.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    start, batch = network(), sentences()
    moved = {}
    for name, step in (("undivided", undivided), ("before", before), ("after", after)):
        step(model := copy.deepcopy(start), batch)
        moved[name] = (
            matrices(model) - matrices(start),
            parameters_to_vector(model.parameters()).detach()
            - parameters_to_vector(start.parameters()).detach(),
        )
    right = moved["undivided"]
    errors = {
        f"{name}, {part}": float((moved[name][i] - right[i]).norm() / right[i].norm())
        for name in ("before", "after")
        for i, part in enumerate(("Muon", "all"))
    }
    print(
        f"Shown: the update of Muon's matrices is off by {errors['before, Muon']:.0%} in the usual "
        f"loop, by {errors['after, Muon']:.0e} with wb.WholeBatch; that of all weights by "
        f"{errors['before, all']:.0%} and {errors['after, all']:.0e}."
    )
    return errors


if __name__ == "__main__":
    main()
