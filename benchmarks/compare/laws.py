"""The cases beside the split: BatchNorm's statistics, bf16, a contrastive loss, NaN, resume.

A library comes in with one function, which trains one epoch over micro-batches that are given:

    def run(model, optimizer, micros, steps, loss, mode, **options) -> None: ...

`mode` is "own" for the library's accumulation (the whole batch is one of 1 micro-batch) and "ours"
for wholebatch in it, which gets the options. `loss(model, micro)` is the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compare.row import Row
from wholebatch.errors import NonFiniteError, WholebatchError
from wholebatch.options import Close

__all__ = ["Micro", "Run", "law_rows", "model_of", "windows_of"]

Micro = dict[str, Tensor]
Run = Callable[..., None]
Resume = Callable[[str], nn.Module]

WIDTH, CLASSES, STEPS, RATE = 6, 4, 4, 0.1
SIZES = (3, 5, 2, 6, 4, 4, 3, 5)  # two windows of four
MANY = 256


def samples(number: int, dtype: torch.dtype = torch.float64) -> Micro:
    draw = torch.Generator().manual_seed(11)
    x = torch.randn(number, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randint(0, CLASSES, (number,), generator=draw)}


def cut(batch: Micro, sizes: Sequence[int]) -> list[Micro]:
    parts = {name: leaf.split(list(sizes)) for name, leaf in batch.items()}
    return [{name: part[at] for name, part in parts.items()} for at in range(len(sizes))]


def model_of(dtype: torch.dtype = torch.float64, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(5)
    first = [nn.BatchNorm1d(WIDTH)] if norm else []
    return nn.Sequential(*first, nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def mean(model: nn.Module, micro: Micro) -> Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"])


def compares(model: nn.Module, micro: Micro) -> Tensor:
    z = functional.normalize(model(micro["x"]), dim=1)
    return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def windows_of() -> tuple[list[Micro], list[Micro]]:
    """The micro-batches of two windows, and the undivided batches."""
    whole = [sum(SIZES[:STEPS]), sum(SIZES[STEPS:])]
    return cut(samples(sum(SIZES)), SIZES), cut(samples(sum(SIZES)), whole)


def trained(run: Run, micros: Sequence[Micro], steps: int, loss: Any, mode: str, **o: Any) -> Any:
    model = model_of()
    run(model, sgd(model), micros, steps, loss, mode, **o)
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double().clone()


def distance(got: Tensor, want: Tensor, start: Tensor | float = 0.0) -> float | str:
    found = float((got - want).norm() / (want - start).norm())
    return found if found == found else "NaN"


def law_rows(library: str, run: Run, resume: Resume, *, precision: str = "float64") -> list[Row]:
    """The rows of a library for these cases."""
    micros, wholes = windows_of()
    whole, start = trained(run, wholes, 1, mean, "own"), flat(model_of())
    rows = [
        _statistics(library, run, micros, wholes),
        _in_16_bit(library, run),
        _contrastive(library, run, micros, wholes),
        _nan(library, run, micros, wholes),
    ]
    own = distance(flat(resume("own")), whole, start)
    try:
        ours = distance(flat(resume("ours")), whole, start)
    except WholebatchError:
        ours = "refused"
    note = "saved after 6 of 8 micro-batches, in the second window"
    return [*rows, Row(library, "resume", own, ours, precision, note)]


def _statistics(library: str, run: Run, micros: Any, wholes: Any) -> Row:
    """Running statistics of a BatchNorm on the inputs, after two windows."""

    def found(micros: Any, steps: int, mode: str, **options: Any) -> Tensor:
        model = model_of(norm=True)
        run(model, sgd(model), micros, steps, mean, mode, **options)
        norm: Any = model[0]
        return torch.cat([norm.running_mean, norm.running_var])

    whole = found(wholes, 1, "own")
    own = distance(found(micros, STEPS, "own"), whole)
    try:
        ours: Any = distance(found(micros, STEPS, "ours"), whole)
    except WholebatchError:
        ours = "refused"
    return Row(library, "BatchNorm statistics", own, ours, "float64", "running statistics")


def _in_16_bit(library: str, run: Run) -> Row:
    """The gradient of 256 micro-batches in bf16, beside their sum in float64."""
    micros = cut(samples(2 * MANY, torch.bfloat16), [2] * MANY)
    other = model_of(torch.bfloat16)
    parameters = list(other.parameters())
    truth = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for micro in micros:
        parts = torch.autograd.grad(mean(other, micro), parameters)
        truth += torch.cat([part.flatten().double() for part in parts]) / MANY

    def found(mode: str) -> Tensor:
        model, seen = model_of(torch.bfloat16), []
        optimizer = sgd(model)
        optimizer.register_step_post_hook(
            lambda *_: seen.append(
                torch.cat([p.grad.flatten().double() for p in model.parameters()])  # type: ignore[union-attr]
            )
        )
        run(model, optimizer, micros, MANY, mean, mode, audit=False)
        return seen[0]

    own, ours = (distance(found(mode), truth) for mode in ("own", "ours"))
    return Row(library, "bf16 × 256", own, ours, "bf16", "the gradient, beside its sum in float64")


def _contrastive(library: str, run: Run, micros: Any, wholes: Any) -> Row:
    """A plain loss that compares all samples with each other."""
    whole, start = trained(run, wholes, 1, compares, "own"), flat(model_of())
    own = distance(trained(run, micros, STEPS, compares, "own"), whole, start)
    try:
        ours = distance(trained(run, micros, STEPS, compares, "ours"), whole, start)
    except WholebatchError:
        ours = "refused"
    return Row(library, "contrastive", own, ours, "float64")


def _nan(library: str, run: Run, micros: Any, wholes: Any) -> Row:
    """A NaN in the second window: what was trained beside the first window alone."""
    spoiled = [*micros]
    spoiled[5] = {**spoiled[5], "x": spoiled[5]["x"] * torch.nan}
    whole, start = trained(run, wholes[:1], 1, mean, "own"), flat(model_of())
    own = distance(trained(run, spoiled, STEPS, mean, "own"), whole, start)
    ours = distance(
        trained(run, spoiled, STEPS, mean, "ours", close=Close(nonfinite="skip")), whole, start
    )
    try:
        trained(run, spoiled, STEPS, mean, "ours")
        ours = "NaN"  # it must raise
    except NonFiniteError:
        pass
    return Row(library, "NaN", own, ours, "float64", 'nonfinite="skip"; raises by default')
