"""One meaning per word: `total` is a sum, `mean` is a mean, in every loop over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholebatch.core.loss import Loss, Terms, Units, check_units
from wholebatch.coupled.contrastive.losses import refuse_in_parts
from wholebatch.errors import LossError

__all__ = ["Given"]


@dataclass(frozen=True)
class Given:
    """The loss of one micro-batch: where its backward begins, its units, and what it is of them.

    >>> weight = torch.ones((), requires_grad=True)
    >>> Given.of(weight * 6, units=3).total.item()
    6.0
    >>> Given.of(mean=weight * 2, units=3).total.item()
    6.0
    """

    loss: Tensor
    units: Units
    is_mean: bool

    @classmethod
    def of(
        cls,
        total: Tensor | Loss | Terms | None = None,
        units: Units | None = None,
        mean: Tensor | None = None,
        *,
        audit: bool = True,
    ) -> Given:
        """Return what `backward(total, units=)` or `backward(mean=, units=)` was given."""
        if (total is None) == (mean is None):
            raise LossError(
                f"backward() with {'neither' if total is None else 'both'} of total and mean=: "
                "give the sum as backward(total, units=...), or the mean as "
                "backward(mean=..., units=...)"
            )
        if isinstance(total, Terms):
            raise LossError(
                f"a loss of several terms ({', '.join(total.by_name)}) in a stream: each is "
                "divided by its own total over the window, which must be known before the first "
                "backward; use wb.WholeBatch with units="
            )
        if isinstance(total, Loss):
            if units is not None:
                raise LossError("units= beside a wb.Loss, which carries its own: give one")
            if audit:
                refuse_in_parts(total)
            return cls(_checked(total.total), check_units(total.units), is_mean=False)
        if units is None:
            raise LossError(
                "backward() without units=: say what the loss is a sum or a mean over "
                "(units=samples, tokens or weights), or pass a wb.Loss"
            )
        if mean is not None:
            return cls(_checked(mean), check_units(units), is_mean=True)
        return cls(_checked(total), check_units(units), is_mean=False)

    @property
    def as_written(self) -> dict[str, Any]:
        """The words that it was given with."""
        return {"mean" if self.is_mean else "total": self.loss, "units": self.units}

    @property
    def weight(self) -> Units:
        """What the loss is to be multiplied by to be a sum; a tensor in float64."""
        if not self.is_mean:
            return 1.0
        return self.units.double() if isinstance(self.units, Tensor) else self.units

    @property
    def total(self) -> Tensor | float:
        """The sum, detached; a mean over no units (0/0) adds nothing."""
        value = self.loss.detach().reshape(())
        if value.dtype in (torch.float16, torch.bfloat16):
            value = value.float()  # times 10,000 is beyond fp16, and 1001 is 1000 in bf16
        units = self.units
        if not self.is_mean:
            return value
        if isinstance(units, Tensor):
            units = units.to(value.device)
            # Not 0.0: where() would copy it from the host, and wait for the device.
            return torch.where(units == 0, value.new_zeros(()), value * units)
        return value * units if units else 0.0


def _checked(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise LossError(
            f"loss {what}: must be one number, the sum or the mean over the micro-batch's units"
        )
    if not loss.requires_grad:
        raise LossError(
            "the loss does not require a gradient: it is detached from the model, was computed "
            "under torch.no_grad(), or every parameter that it depends on is frozen"
        )
    return loss
