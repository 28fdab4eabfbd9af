"""How far sums may differ by rounding alone: of a loss, of a gradient, of the same run again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wholebatch.core.precision import SIXTEEN_BIT
from wholebatch.coupled.gradient_digests import LINEAR
from wholebatch.coupled.sample_runs import Few, Run, Sum

__all__ = ["Tolerance"]

_NOTHING = Sum(0.0, 0.0, 0.0, 1.0, torch.float32)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Far more than rounding makes of a sum, far less than another loss does.

    `relative` is of the size of what is summed. `absolute` is of a mean loss, which may be near
    zero because its parts cancel. `again` is for the same samples run twice. `floor` is of the
    gradient over all parameters: one that is zero but for rounding (the bias of a key in
    attention) says nothing.
    """

    relative: float
    absolute: float
    again: float
    floor: float

    @staticmethod
    def of(few: Few, run: Run) -> Tolerance:
        """Return that of the precision that these samples were computed in."""
        called, dtypes = few.called, {made.dtype for made in run.sums.values()}
        if called.low or dtypes & set(SIXTEEN_BIT):
            return Tolerance(5e-2, 1e-2, 1e-2, 5e-2)
        if called.wide and dtypes <= {torch.float64}:
            return Tolerance(1e-9, 1e-12, 1e-12, 1e-12)
        on_gpu = any(parameter.is_cuda for _, parameter in few.parameters)
        if on_gpu and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
            return Tolerance(1e-2, 1e-4, 1e-4, 1e-3)
        return Tolerance(1e-3, 1e-5, 1e-5, 1e-5)

    def adds_up(self, whole: Run, parts: Sequence[Run]) -> bool:
        """True if every term's total and units are the sums of those of the parts."""
        for name in _names([whole, *parts]):
            made = [run.sums.get(name, _NOTHING) for run in (whole, *parts)]
            if not self._is_sum(made[0], made[1:]):
                return False
        return self.units_add_up(whole, parts)

    def units_add_up(self, whole: Run, parts: Sequence[Run]) -> bool:
        """True if the units of each term are the sum of those of the parts."""
        for name in _names([whole, *parts]):
            units = whole.sums.get(name, _NOTHING).units
            apart = math.fsum(part.sums.get(name, _NOTHING).units for part in parts)
            if abs(units - apart) > max(1e-5, self.relative / 100) * max(abs(units), abs(apart)):
                return False
        return True

    def _is_sum(self, whole: Sum, parts: Sequence[Sum]) -> bool:
        size = max(whole.size, math.fsum(part.size for part in parts))
        units = max(whole.units, math.fsum(part.units for part in parts), 1.0)
        return self.near(whole.total, math.fsum(part.total for part in parts), size, units)

    def near(self, a: float, b: float, size: float, units: float = 1.0) -> bool:
        """True if two sums differ by rounding alone; also where one is not finite."""
        if not (math.isfinite(a) and math.isfinite(b)):
            return True
        return abs(a - b) <= self.relative * size + self.absolute * units

    def same_again(self, a: Run, b: Run) -> bool:
        """True if two runs of the same samples gave the same loss."""
        for name in _names([a, b]):
            x, y = a.sums.get(name, _NOTHING), b.sums.get(name, _NOTHING)
            if math.isfinite(x.total) and abs(x.total - y.total) > self.again * max(x.size, y.size):
                return False
            if abs(x.units - y.units) > 1e-6 * max(x.units, y.units):
                return False
        return True

    def gradient_gap(self, whole: Run, parts: Sequence[Run]) -> tuple[int, float] | None:
        """Return the parameter whose gradient adds up worst, and by how much; None if all do."""
        made = [run.digests for run in (whole, *parts)]
        if any(digests is None for digests in made):
            return None
        first, *others = [digests for digests in made if digests is not None]
        apart = torch.stack(others).sum(0)
        if not (first.isfinite().all() and apart.isfinite().all()):
            return None
        gaps = (first - apart)[:, :LINEAR].abs().amax(1)
        sizes: Tensor = torch.maximum(first[:, LINEAR], apart[:, LINEAR])
        over = gaps > torch.maximum(3 * self.relative * sizes, self.floor * sizes.norm())
        if not bool(over.any()):
            return None
        ratios = torch.where(over, gaps / sizes.clamp_min(1e-300), 0.0)
        worst = int(ratios.argmax())
        return worst, float(ratios[worst])


def identical(a: Run, b: Run) -> bool:
    """True if two runs gave the same loss to the last bit."""
    return {n: (s.total, s.units) for n, s in a.sums.items()} == {
        n: (s.total, s.units) for n, s in b.sums.items()
    } or not math.isfinite(a.total)


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.sums))
