"""Ways to make a micro-batch of one sample fit, and their predicted peaks.

The ways are tried from the cheapest on: compute in 16 bit, then checkpoint activations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wholebatch.memory.predict import Prediction, Simulation
from wholebatch.readable_sizes import bytes_said


@dataclass(frozen=True)
class Rung:
    """Ways to save memory, and the peak of one sample with them."""

    what: str
    prediction: Prediction
    fits: bool
    options: dict[str, Any] = field(default_factory=dict)
    """The arguments of `Simulation.predict` that ask for them."""

    @property
    def peak(self) -> int:
        """The predicted peak in bytes."""
        return self.prediction.peak


def ladder(
    simulation: Simulation,
    sample: Any,
    *,
    budget: int,
    precision: str = "full",
    checkpoints: bool = False,
    as_is: Prediction | None = None,
) -> list[Rung]:
    """Return the peak of a micro-batch like `sample` as it is, and with each way to save memory.

    Each way is added to those before it that save memory. `as_is` is a prediction that was already
    made.
    """
    blocks = simulation.blocks
    ways: dict[str, dict[str, Any]] = {}
    if precision in ("full", "fp32") and not simulation.is_sixteen_bit:
        ways["bf16 autocast"] = {"precision": "bf16"}
    if blocks and not checkpoints:
        ways[f"checkpointing of {len(blocks)} blocks"] = {"checkpoints": True}

    def rung(what: str, prediction: Prediction, options: dict[str, Any]) -> Rung:
        return Rung(what, prediction, prediction.needed(simulation.device) <= budget, options)

    used: list[str] = []
    options: dict[str, Any] = {"precision": precision, "checkpoints": checkpoints}
    best = as_is or simulation.predict(sample, **options)
    rungs = [rung("as it is", best, options)]
    for what, option in ways.items():
        prediction = simulation.predict(sample, **{**options, **option})
        rungs.append(rung(" and ".join([*used, what]), prediction, {**options, **option}))
        # 16-bit copies of the weights may cost more than they save.
        if prediction.peak < best.peak:
            best = prediction
            used.append(what)
            options |= option
    return rungs


def refusal(rungs: list[Rung], budget: int, *, is_sharded: bool = False) -> str:
    """Return the error message for a budget that one sample does not fit."""
    first, *others = rungs
    said = [
        f"{rung.what} {bytes_said(rung.peak)}{' (fits)' if rung.fits else ''}" for rung in others
    ]
    would = f"; with {', '.join(said)}" if said else ""
    helps = any(rung.fits for rung in others)
    last = ""
    if not helps:
        last = (
            "; use a smaller model, shorter samples, larger devices, or more of them"
            if is_sharded
            else "; use a smaller model, shorter samples, a larger device, or a sharded model; on "
            'a GPU also wb.Memory(optimizer_state="host")'
        )
    return (
        f"memory={bytes_said(budget)}: a micro-batch of one sample needs"
        f" {bytes_said(first.peak)}{would}{last}"
    )
