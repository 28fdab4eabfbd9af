"""The loss that a loop gives to `backward`, in any of its forms, as a sum and its units."""

from __future__ import annotations

from torch import Tensor

from wholebatch.errors import LossError
from wholebatch.losses.loss import Loss, Terms, Units, check_total, check_units, mean_loss
from wholebatch.window.close import check_terms


def sum_and_units(
    total: Tensor | Loss | Terms | None = None,
    units: Units | None = None,
    mean: Tensor | None = None,
) -> tuple[Tensor, Units]:
    """Return the loss of a micro-batch as a sum with its graph, and its units.

    It is given as a sum, a `wb.Loss` or a mean.

    >>> import torch
    >>> weight = torch.ones((), requires_grad=True)
    >>> sum_and_units(weight * 6, units=3)[0].item()
    6.0
    >>> sum_and_units(mean=weight * 2, units=3)[0].item()
    6.0
    """
    if mean is not None and total is not None:
        raise LossError(
            "backward() with both total and mean=: total is the sum over the units, mean is "
            "the mean over them; pass one of the two"
        )
    if isinstance(total, Loss):
        if units is not None:
            raise LossError("units= with a wb.Loss, which has its own units: leave units= out")
        return total.total, total.units
    if isinstance(total, Terms):
        check_terms(None, total.by_name)  # refuses: a stream cannot know the terms' totals
    if total is None and mean is None:
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
    if mean is None:
        return check_total(total), check_units(units)
    loss = mean_loss(mean, units)
    return loss.total, loss.units
