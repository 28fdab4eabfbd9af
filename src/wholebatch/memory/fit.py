"""When a micro-batch of one does not fit: what would make it fit, by how much, and doing it.

The ladder of the field, cheapest first: compute in 16 bits, compute activations again, shard the
model over devices. The first two can be applied here; sharding is another way of running.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from wholebatch.errors import OptionError
from wholebatch.memory.batches import resize_batch
from wholebatch.memory.budget import bytes_said
from wholebatch.memory.checkpointing import (
    checkpointed,
    is_checkpointed,
    repeated_blocks,
    with_checkpoints,
)
from wholebatch.memory.choose import Choice, choose_micro_batch, spare
from wholebatch.memory.predict import Prediction, Predictor
from wholebatch.memory.sharding import Sharding
from wholebatch.splitting.layout import Static

__all__ = ["Fit", "Rung", "fit", "ladder", "lower_precisions", "refusal"]

_SHARDED = ("parameters", "gradients", "optimizer state")
_MOST_DEVICES = 1024


@dataclass(frozen=True)
class Rung:
    """One way to need less memory, and what one sample would then need."""

    what: str
    peak: int
    fits: bool
    precision: str
    checkpoints: bool
    devices: int = 1
    gradients: str = "device"
    """Where the gradients go; only ways that make the same update are tried."""


@dataclass(frozen=True)
class Fit:
    """What was applied so that the model fits, and the micro-batch that it then takes."""

    choice: Choice
    precision: str
    blocks: list[str]
    """The blocks that are checkpointed from now on; empty if that was not needed."""
    gradients: str = "device"
    """Where the gradients are to go: "host" if nothing else was enough."""


def fit(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    budget: int,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    most: int | None = None,
    device: torch.device | str | None = None,
    static: Static = (),
) -> Fit:
    """Make one sample fit, by bf16 autocast, checkpointing and sums on the host, in this order.

    Then choose the micro-batch.

    Nothing is applied that is not needed. Checkpointing changes the model's blocks (not its
    numbers); the precision is returned for whoever runs the model. If nothing helps, an
    OptionError says what each would give.
    """

    rungs = ladder(
        model,
        loss,
        resize_batch(batch, 1, static=static),
        budget=budget,
        optimizer=optimizer,
        precision=precision,
        device=device,
    )
    rung = next((one for one in rungs if one.fits and one.devices == 1), None)
    if rung is None:
        raise OptionError(refusal(rungs, budget))
    blocks = with_checkpoints(model, _blocks_to_checkpoint(model)) if rung.checkpoints else []
    choice = choose_micro_batch(
        model,
        loss,
        batch,
        budget=budget,
        optimizer=optimizer,
        precision=rung.precision,
        most=most,
        device=device,
        static=static,
        gradients=rung.gradients,
    )
    return Fit(choice, rung.precision, blocks, rung.gradients)


def ladder(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    sample: Any,
    *,
    budget: int,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    device: torch.device | str | None = None,
    lowers: bool = True,
    sharding: Sharding | None = None,
) -> list[Rung]:
    """What a micro-batch like `sample` needs as things are, and on each rung below.

    With `lowers=False` the precision stays as it is. `sharding` is how the model is spread already.
    """

    predictor = Predictor(model, loss, optimizer=optimizer, device=device)
    target = predictor.device

    def predict(precision: str, gradients: str = "device") -> Prediction:
        return predictor.peak(sample, precision=precision, gradients=gradients, sharding=sharding)

    def fits(found: Prediction) -> bool:
        return found.peak + spare(found, target) <= budget

    best = as_is = predict(precision)
    rungs = [Rung("as it is", as_is.peak, fits(as_is), precision, False)]
    lower = next(iter(lower_precisions(model, precision)), None) if lowers else None
    if lower is not None:
        best = predict(lower)
        rungs.append(Rung(f"{lower} autocast", best.peak, fits(best), lower, False))
    blocks = _blocks_to_checkpoint(model)
    # Where 16-bit copies of the weights outweigh what is saved, checkpointing alone comes first.
    alone = [None] if lower is None or best.peak >= as_is.peak else []
    for also in [*alone, *([lower] if lower else [])] if blocks else []:
        with checkpointed(model, blocks):
            found = predict(also or precision)
        what = f"{also} autocast and " if also else ""
        what += f"checkpointing of {len(blocks)} blocks"
        rungs.append(Rung(what, found.peak, fits(found), also or precision, True))
        best = min(best, as_is, found, key=lambda one: one.peak)
    if sharding is not None:
        return rungs
    if target.type == "cuda":  # with all of the above; the host is slower than any of it
        last = rungs[-1]
        around: AbstractContextManager[object] = nullcontext()
        if last.checkpoints:
            around = checkpointed(model, blocks)
        with around:
            best = predict(last.precision, "host")
        what = "gradients on the host" if len(rungs) == 1 else f"{last.what}, gradients on the host"
        rungs.append(replace(last, what=what, peak=best.peak, fits=fits(best), gradients="host"))
    if not fits(best):
        devices = _devices_needed(best, budget)
        if devices is not None:
            peak = _sharded(best, devices)
            what = f"and sharding over {devices} devices"
            rungs.append(Rung(what, peak, True, lower or precision, bool(blocks), devices))
    return rungs


def refusal(rungs: list[Rung], budget: int) -> str:
    """One sentence for a budget that one sample does not fit."""
    first, *others = rungs
    said = [
        f"{rung.what} {bytes_said(rung.peak)}{' (fits)' if rung.fits else ''}" for rung in others
    ]
    would = f"; with {', '.join(said)}" if said else ""
    helps = any(rung.fits for rung in others)
    last = "" if helps else "; use a smaller model, shorter samples, or a larger device"
    return (
        f"memory={bytes_said(budget)}: a micro-batch of one sample needs"
        f" {bytes_said(first.peak)}{would}{last}"
    )


def lower_precisions(model: torch.nn.Module, precision: str) -> list[str]:
    """Precisions that may need less: autocast gains nothing where parameters are 16-bit."""
    is_wide = any(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    return ["bf16"] if precision in ("full", "fp32") and is_wide else []


def _blocks_to_checkpoint(model: torch.nn.Module) -> list[str]:
    modules = dict(model.named_modules())
    return [name for name in repeated_blocks(model) if not is_checkpointed(modules[name])]


def _sharded(prediction: Prediction, devices: int) -> int:
    """Parameters, gradients and optimizer state divided; the gathered layer is not counted."""
    shared = sum(prediction.by_category[name] for name in _SHARDED)
    return prediction.peak - shared + -(-shared // devices)


def _devices_needed(prediction: Prediction, budget: int) -> int | None:
    devices = 2
    while devices <= _MOST_DEVICES:
        if _sharded(prediction, devices) <= budget:
            return devices
        devices *= 2
    return None
