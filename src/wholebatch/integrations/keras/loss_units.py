"""The units of Keras losses, observed while Keras computes them.

Keras reduces every loss to a number itself (`keras.losses.Loss.reduction`):

| reduction | the number | units |
|---|---|---|
| `sum_over_batch_size`, `mean` | Σ w·l / n | n loss values; with a mask those kept |
| `mean_with_sample_weight` | Σ w·l / Σ w | Σ w, masked |
| `sum`, none | Σ w·l | none: sums of micro-batches add up |

`Observed` replaces a loss in the compiled model. It returns what the loss returns, and records
those units. Losses with the same units share a window (`Group`); others need their own. Losses that
layers add (`add_loss`, activity regularisers) are per sample in Keras. Weight regularisers are the
same in every micro-batch, so they may be part of any mean.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops
from keras.src import backend, tree
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss

from wholebatch.errors import LossError

__all__ = ["Group", "Observed", "ObservedLosses", "groups_of", "wide"]

SAMPLES = "samples"
SUM = "sum"


def wide() -> str:
    """Return the dtype that units are counted in: float64 if Keras computes in it, else float32."""
    return "float64" if keras.config.floatx() == "float64" else "float32"


@dataclass(frozen=True)
class Term:
    """One loss of a micro-batch: its weighted value and its units."""

    key: Hashable
    value: Any
    units: Any


@dataclass(frozen=True)
class Group:
    """The losses of a micro-batch with the same units, added; `units` is None for sums."""

    loss: Any
    units: Any


class Observed:
    """A Keras loss that records its units when it is called."""

    def __init__(self, loss: Any, weight: float | None, noted: list[Term]) -> None:
        self.loss = loss
        self.weight = weight
        self.noted = noted
        self.name = loss.name

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        seen: list[Any] = []
        original = self.loss.call

        def call(y_true: Any, y_pred: Any) -> Any:
            seen.append(original(y_true, y_pred))
            return seen[-1]

        self.loss.call = call  # On the instance, so that other losses are not affected.
        try:
            value = self.loss(y_true, y_pred, sample_weight)
        finally:
            del self.loss.call
        key, units = self._units(seen, y_pred, sample_weight)
        weighted = ops.cast(value, wide())
        if self.weight is not None:
            weighted = ops.multiply(weighted, self.weight)
        self.noted.append(Term(key, weighted, units))
        return value

    def _units(self, seen: list[Any], y_pred: Any, sample_weight: Any) -> tuple[Hashable, Any]:
        reduction = self.loss.reduction
        if reduction in ("sum", "none", None):
            return SUM, None
        if len(seen) != 1 or len(seen[0].shape) == 0:
            raise LossError(
                f"the loss {self.name!r} returns one number, which may be a sum or a mean: let it "
                "return one value per sample, or say what it is a mean over: "
                "GradientAccumulateModel(..., units=function)"
            )
        values = seen[0]
        mask = None if tree.is_nested(y_pred) else backend.get_keras_mask(y_pred)
        own = backend.get_keras_mask(values)
        if mask is None or own is None:
            mask = own if mask is None else mask
        else:
            mask = ops.logical_and(mask, own)
        if reduction == "mean_with_sample_weight" and not (mask is None and sample_weight is None):
            return id(self), ops.sum(_merged(sample_weight, mask))
        if mask is None:
            shape = tuple(values.shape)
            if all(isinstance(size, int) for size in shape[1:]):
                return SAMPLES, ops.cast(ops.shape(values)[0], wide())
            return id(self), ops.cast(ops.size(values), wide())
        # Keras weights kept values by size(mask) / kept, then divides by size(values).
        kept = ops.sum(ops.cast(mask, wide()))
        ratio = ops.cast(ops.size(values), wide()) / ops.cast(ops.size(mask), wide())
        return id(self), kept * ratio


def _merged(sample_weight: Any, mask: Any) -> Any:
    """Return weights × mask. On torch, Keras multiplies in place, which must not happen twice."""
    if sample_weight is None or mask is None:
        return ops.cast(mask if sample_weight is None else sample_weight, wide())
    kept, weights = squeeze_or_expand_to_same_rank(
        ops.cast(mask, wide()), ops.cast(sample_weight, wide())
    )
    return kept * weights


class ObservedLosses(CompileLoss):  # type: ignore[misc]
    """The compiled losses of a model, each one observed."""

    _flat_losses: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noted: list[Term] = []

    def build(self, y_true: Any, y_pred: Any) -> None:
        super().build(y_true, y_pred)
        self._flat_losses = [
            entry._replace(loss=Observed(entry.loss, entry.loss_weights, self.noted))
            for entry in self._flat_losses
        ]

    def call(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.noted.clear()
        value = super().call(y_true, y_pred, sample_weight)
        if not tree.is_nested(y_true) and not tree.is_nested(y_pred):
            del self.noted[1:]  # Here Keras computes all losses but uses only the first.
        return value


def groups_of(model: Any, loss: Any, *, samples: Any, units: Any, replicas: int) -> list[Group]:
    """Return the micro-batch's losses grouped by units; most models have one group.

    `loss` is the result of `compute_loss`, `samples` the size of the micro-batch, and `units`, if
    not None, the user's count. Keras divides means by the number of replicas; this undoes it.
    """
    loss = ops.cast(loss, wide())
    if units is not None:
        return [Group(loss * replicas, ops.cast(units, wide()))]
    noted = [] if model._compile_loss is None else list(model._compile_loss.noted)
    added = list(model.losses)
    riding = len(added) == len(model._get_regularization_losses())
    keys = list(dict.fromkeys(term.key for term in noted))
    if not noted:
        return [Group(loss * replicas, samples)]
    if len(keys) == 1 and (not added or keys[0] == SAMPLES or (riding and keys[0] != SUM)):
        if keys[0] == SUM:
            return [Group(loss, None)]
        # Losses with SAMPLES differ only in fixed shapes: the units of one hold for all.
        return [Group(loss * replicas, noted[0].units)]

    groups: dict[Hashable, Group] = {}
    for term in noted:
        scale = 1 if term.key == SUM else replicas
        before = groups.get(term.key)
        value = term.value * scale if before is None else before.loss + term.value * scale
        groups[term.key] = Group(value, term.units)
    if added:
        total = sum(ops.sum(ops.cast(each, wide())) for each in added)
        means = [key for key in keys if key != SUM]
        key = SAMPLES if SAMPLES in groups or not riding or not means else means[0]
        before = groups.get(key)
        groups[key] = (
            Group(total, samples) if before is None else Group(before.loss + total, before.units)
        )
    return list(groups.values())
