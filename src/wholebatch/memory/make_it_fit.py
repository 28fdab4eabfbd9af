"""Ways to make a micro-batch of one sample fit, and their predicted peaks.

The ways are tried from the cheapest on: compute in 16 bit, checkpoint activations, keep the
optimizer's state on the host. Devices on which a model would fit are the matter of `plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from wholebatch.memory.activation_checkpointing import blocks_to_checkpoint, checkpointed
from wholebatch.memory.fsdp_sharding import Sharding
from wholebatch.memory.predict import Prediction, Predictor
from wholebatch.readable_sizes import bytes_said


@dataclass(frozen=True)
class Rung:
    """One way to save memory, and the peak of one sample with it."""

    what: str
    peak: int
    fits: bool
    precision: str
    checkpoints: bool
    optimizer_state: str = "device"
    """Where the optimizer's state is between steps."""


def ladder(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    sample: Any,
    *,
    budget: int,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    device: torch.device | str | None = None,
    sharding: Sharding | None = None,
    as_is: Prediction | None = None,
) -> list[Rung]:
    """Return the peak of a micro-batch like `sample` as it is, and with each way to save memory.

    `sharding` is the model's current sharding, `as_is` a prediction that was already made.
    """
    predictor = Predictor(model, loss, optimizer=optimizer, device=device)
    blocks = blocks_to_checkpoint(model)

    def predict(precision: str, *, checkpoints: bool = False, **options: Any) -> Prediction:
        with checkpointed(model, blocks) if checkpoints else nullcontext():
            return predictor.peak(sample, precision=precision, sharding=sharding, **options)

    def fits(found: Prediction) -> bool:
        return found.needed(predictor.device) <= budget

    best = as_is = as_is or predict(precision)
    rungs = [Rung("as it is", as_is.peak, fits(as_is), precision, False)]
    lower = next(iter(lower_precisions(model, precision)), None)
    if lower is not None:
        best = predict(lower)
        rungs.append(Rung(f"{lower} autocast", best.peak, fits(best), lower, False))
    combined: list[str | None] = [lower]
    if lower is not None and best.peak >= as_is.peak:
        combined = [None, lower]  # The 16-bit copies of the weights cost more than they save.
    for also in combined if blocks else []:
        found = predict(also or precision, checkpoints=True)
        what = f"{also} autocast and " if also else ""
        what += f"checkpointing of {len(blocks)} blocks"
        rungs.append(Rung(what, found.peak, fits(found), also or precision, True))
    if sharding is None and predictor.device.type == "cuda":
        # The host is slower, so combine it with the other ways.
        last = rungs[-1]
        best = predict(last.precision, checkpoints=last.checkpoints, optimizer_state="host")
        moved = "optimizer state on the host"
        what = moved if len(rungs) == 1 else f"{last.what}, {moved}"
        rungs.append(
            replace(last, what=what, peak=best.peak, fits=fits(best), optimizer_state="host")
        )
    return rungs


def refusal(rungs: list[Rung], budget: int) -> str:
    """Return the error message for a budget that one sample does not fit."""
    first, *others = rungs
    said = [
        f"{rung.what} {bytes_said(rung.peak)}{' (fits)' if rung.fits else ''}" for rung in others
    ]
    would = f"; with {', '.join(said)}" if said else ""
    helps = any(rung.fits for rung in others)
    last = ""
    if not helps:
        last = "; use a smaller model, shorter samples, a larger device, or a sharded model"
    return (
        f"memory={bytes_said(budget)}: a micro-batch of one sample needs"
        f" {bytes_said(first.peak)}{would}{last}"
    )


def lower_precisions(model: torch.nn.Module, precision: str) -> list[str]:
    """Return precisions that may need less memory; none if the parameters are 16-bit already."""
    is_wide = any(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    return ["bf16"] if precision in ("full", "fp32") and is_wide else []
