"""The result of a tuning: the settings to train with, the reasons, and all trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wholebatch.core.json_files import finite, write_json
from wholebatch.memory.budget import bytes_said
from wholebatch.tune.bottleneck import Bottleneck
from wholebatch.tune.settings import Trial

__all__ = ["Tuned", "advice_of"]


@dataclass(frozen=True)
class Tuned:
    """The recommendation and its evidence; `settings` are options of `wholebatch train`."""

    best: Trial
    trials: tuple[Trial, ...]
    settings: Mapping[str, Any]
    advice: tuple[str, ...]
    bottleneck: Bottleneck
    accumulation: tuple[str, ...]
    batch_size: int
    unit: str
    device: str
    budget: int
    seconds: float
    memory: Mapping[str, Any]
    ranks: Mapping[str, Any] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """True if the batch should be divided, False if it is best left whole."""
        return self.best.steps > 1

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `tune.json`, which `train --from` and `wholebatch report` read."""
        data: dict[str, Any] = {
            "kind": "wholebatch tune",
            **self.about,
            "settings": dict(self.settings),
            "advice": list(self.advice),
            "bottleneck": {
                "kind": self.bottleneck.kind,
                "evidence": list(self.bottleneck.evidence),
            },
            "accumulation": list(self.accumulation),
            "batch_size": self.batch_size,
            "unit": self.unit,
            "device": self.device,
            "budget": self.budget,
            "seconds": self.seconds,
            "trials": [trial.to_dict() for trial in self.trials],
            "memory": dict(self.memory),
            "ranks": None if self.ranks is None else dict(self.ranks),
        }
        result: dict[str, Any] = finite(data)
        return result

    def write(self, path: Path) -> None:
        """Write `to_dict` as JSON."""
        write_json(path, self.to_dict())


def advice_of(best: Trial, trials: tuple[Trial, ...], *, budget: int, unit: str) -> tuple[str, ...]:
    """Return the recommendation in sentences; the first one is the answer."""
    way, size = best.setting.way, best.setting.micro_batch
    rate = best.units_per_second or 0.0
    speed = f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"
    divided = [trial for trial in trials if trial.steps > 1 and trial.units_per_second]
    if best.steps == 1:
        head = f"do not accumulate: the batch fits undivided ({way.said()}), {speed}"
    else:
        head = f"micro-batch {size} × {best.steps} steps ({way.said()}), {speed}"
    said = [head]
    if best.steps == 1 and divided:
        other = max(divided, key=lambda trial: trial.units_per_second or 0.0)
        said.append(
            f"With micro-batches it reaches {(other.units_per_second or 0.0) / rate:.0%} of that "
            f"at best ({other.setting.said()})."
        )
    whole = [trial for trial in trials if trial.steps == 1 and trial.setting.way == way]
    if best.steps > 1 and whole:
        one = whole[0]
        if one.is_measured and one.units_per_second:
            faster = rate / one.units_per_second - 1
            how = f"{faster:.0%} slower" if faster > 0.005 else "no faster"
            memory = f", and takes {bytes_said(one.peak)}" if one.peak else ""
            said.append(f"Undivided, the batch fits too, but is {how}{memory}.")
        else:
            said.append(f"Undivided: {one.why}.")
    peak = best.peak or best.predicted
    if peak:
        said.append(f"Peak memory {bytes_said(peak)} of {bytes_said(budget)}.")
    if way.precision in ("bf16", "fp16"):
        said.append(
            f"{way.precision} rounds more than full precision: the update is that of the undivided "
            f"batch in {way.precision}."
        )
    return tuple(said)
