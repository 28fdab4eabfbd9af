"""The loss of one micro-batch as the user passes it to `backward`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wholebatch.coupled.loop_checks import LoopChecks
from wholebatch.errors import LossError
from wholebatch.losses.loss import (
    Loss,
    Terms,
    Units,
    check_total,
    check_units,
    is_known_to_be_zero,
    mean_loss,
    refuse_lost_mean,
)
from wholebatch.window.close import check_terms


@dataclass(frozen=True)
class GivenLoss:
    """The loss of one micro-batch as a loop gives it: a sum or a mean over its units.

    >>> import torch
    >>> weight = torch.ones((), requires_grad=True)
    >>> GivenLoss.of(weight * 6, units=3).summed.item()
    6.0
    >>> GivenLoss.of(mean=weight * 2, units=3).summed.item()
    6.0
    """

    loss: Tensor
    units: Units
    is_mean: bool = False
    whole: Loss | None = None
    """The `wb.Loss` that it was given as, if it was."""

    @classmethod
    def of(
        cls,
        total: Tensor | Loss | Terms | None = None,
        units: Units | None = None,
        mean: Tensor | None = None,
    ) -> GivenLoss:
        """Return the loss that `backward(total, units=)` or `backward(mean=, units=)` was given."""
        if mean is not None and total is not None:
            raise LossError(
                "backward() with both total and mean=: total is the sum over the units, mean is "
                "the mean over them; pass one of the two"
            )
        if isinstance(total, Loss):
            if units is not None:
                raise LossError("units= with a wb.Loss, which has its own units: leave units= out")
            return cls(total.total, total.units, whole=total)
        if isinstance(total, Terms):
            check_terms(None, total.by_name)  # refuses: a stream cannot know the terms' totals
        loss = total if mean is None else mean
        if loss is None:
            raise LossError(
                "backward() without a loss: give total, the sum over its units, or mean=, the mean "
                "over them, with units="
            )
        if units is None:
            raise LossError(
                "backward(mean=...) without units=: pass the number of samples, tokens or weights "
                "that it is a mean over"
                if mean is not None
                else "backward(total) without units=: pass the number of samples, tokens or "
                "weights that total is a sum over. If it is a mean, call backward(mean=..., "
                "units=...)"
            )
        checked = check_total(loss, "total" if mean is None else "mean")
        given = cls(checked, check_units(units), mean is not None)
        if mean is not None and is_known_to_be_zero(given.units):
            refuse_lost_mean(mean)
        return given

    def check(self, checks: LoopChecks, *, in_parts: bool, steps: int = 0) -> None:
        """Refuse a loss with one of the mistakes that a loop is tested for.

        `steps` is the number of micro-batches of the window, if it is known.
        """
        if self.is_mean:
            checks.check(mean=self.loss, units=self.units, in_parts=in_parts, steps=steps)
        else:
            checks.check(self.whole or self.loss, self.units, in_parts=in_parts, steps=steps)

    @property
    def summed(self) -> Tensor:
        """The sum, with its graph."""
        return mean_loss(self.loss, self.units).total if self.is_mean else self.loss
