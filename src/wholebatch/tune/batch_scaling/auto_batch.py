"""A batch size that grows with the critical batch, and in the place of decay: `--batch-size auto`.

The critical batch grows while a model learns (McCandlish et al. 2018, arXiv:1812.06162). A run that
doubles its batch as soon as the critical one is twice as large makes fewer updates from the same
data (batch-size warm-up, Merrill et al. 2025, arXiv:2505.23971).

Where the schedule halves the learning rate, the batch is doubled instead (Smith et al. 2017,
arXiv:1711.00489, for SGD; Seesaw, Meterez et al. 2025, arXiv:2510.14717, for Adam). An update of
Adam is lr × g / |g|, and |g|² has the parts |G|² of the signal and tr Σ / B of the noise. With the
share s = |G|² / |g|² of the signal, twice the batch divides |g|² by 2 / (1 + s). So the data move
the weights as far as at half the rate, in half the updates, if the schedule's rate is multiplied by

    2 √((1 + s) / 2) = √2 √(1 + s)

This is Seesaw's √2 where noise dominates, and 2 (the rate stays as it was) where there is hardly
any. The √2 is the rule for the batch; `AutoBatch.gain` is the product of the rest.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wholebatch.errors import OptionError
from wholebatch.tune.batch_scaling.batch_arithmetic import check_count

if TYPE_CHECKING:
    from wholebatch.noise_scale import NoiseScale

_TEXT = re.compile(r"auto(?::(\d{1,18})(?:-(\d{1,18}))?)?")
_UPDATES_AT_A_SIZE, _WINDOWS_MEASURED = 32, 8


@dataclass
class AutoBatch:
    """The samples of the next update: `batch`. It doubles with the noise and with the decay.

    After every update, `after(step.units, train.noise, rate)` returns the next size. It doubles if
    the critical batch is estimated as at least twice the batch, and its 95% interval is above the
    batch. It also doubles whenever the schedule has halved its `rate` once more, unless the batch
    before the decay was far above the critical one.

    `done` counts the data, in batches of the first size: a run of 1,000 updates of that size ends
    at `done >= 1000`. Let the schedule go by `done` too.

    >>> from wholebatch.noise_scale import NoiseScale
    >>> noise = NoiseScale(384.0, 300.0, 500.0, spread=9.0, signal=0.01, samples=40,
    ...                    batch=64.0, micro_batches=8)
    >>> auto = AutoBatch(64, largest=512)
    >>> sizes = [auto.after(64.0, noise) for _ in range(32)]
    >>> sizes[0], sizes[-1], auto.done
    (64, 128, 32)
    >>> auto.after(128.0, noise, rate=1e-3), auto.after(128.0, noise, rate=5e-4)
    (128, 256)
    >>> auto.gain  # a quarter of |g|² is signal at 128
    1.118033988749895
    """

    first: int
    largest: int | None = None
    batch: int = field(init=False)
    done: int = field(init=False, default=0)
    gain: float = field(init=False, default=1.0)
    """Multiply Adam's rate by this, beside the square root of the batch."""
    _units: float = field(init=False, default=0.0)
    _updates: int = field(init=False, default=0)
    _peak: float = field(init=False, default=0.0)
    _halvings: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        check_count("first", self.first)
        if self.largest is not None and self.largest < self.first:
            raise OptionError(
                f"largest={self.largest}: must be at least the first size, {self.first}"
            )
        self.batch = self.first

    def after(self, units: float, noise: NoiseScale | None, rate: float = 0.0) -> int:
        """Count an update of `units`, and return the size of the next batch.

        `rate` is the learning rate that the schedule has set, without the factor for the batch.
        """
        self.done += self.batch // self.first
        self._units += units
        self._updates += 1
        self._peak = max(self._peak, rate)
        if noise is None or 2 * self.batch > (self.largest or math.inf):
            return self.batch
        each = self.batch * self._units / (self.done * self.first)
        is_known = noise.samples >= _WINDOWS_MEASURED and self._updates >= _UPDATES_AT_A_SIZE
        is_halved = 0.0 < rate * 2 ** (self._halvings + 1) <= self._peak
        if is_halved and each <= 2 ** (self._halvings + 1) * noise.high:
            self._halvings += 1
            self.gain *= math.sqrt(1.0 + each / (each + noise.critical))
        elif not (is_known and 2 * each <= noise.critical and each <= noise.low):
            return self.batch
        self.batch *= 2
        self._updates = 0
        return self.batch

    def advance(self, schedulers: Any) -> None:
        """Step schedulers once more for each further batch of the first size in this batch.

        A window has stepped them once. One that waits for a plateau of the loss is left alone.
        """
        for scheduler in schedulers if isinstance(schedulers, list | tuple) else [schedulers]:
            if scheduler is not None and type(scheduler).__name__ != "ReduceLROnPlateau":
                for _ in range(self.batch // self.first - 1):
                    scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {key: vars(self)[key] for key in vars(self) if key not in ("first", "largest")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def parse_auto(text: str, label: str = "--batch-size") -> tuple[int | None, int | None]:
    """Return the first and the largest size of `auto`, `auto:64` or `auto:64-1024`.

    >>> parse_auto("auto"), parse_auto("auto:16"), parse_auto("auto:16-512")
    ((None, None), (16, None), (16, 512))
    """
    match = _TEXT.fullmatch(text.strip())
    if match is not None:
        first, largest = (None if one is None else int(one) for one in match.groups())
        if first is None or 0 < first <= (largest or first):
            return first, largest
    raise OptionError(
        f"{label} {text}: must be auto, auto:FIRST or auto:FIRST-LARGEST, such as auto:64-1024"
    )
