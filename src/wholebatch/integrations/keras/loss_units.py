"""The units of Keras losses, observed while Keras computes them.

Keras reduces every loss to a number itself (`keras.losses.Loss.reduction`):

| reduction | the number | units |
|---|---|---|
| `sum_over_batch_size`, `mean` | Σ w·l / n | n loss values; with a mask those kept |
| `mean_with_sample_weight` | Σ w·l / Σ w | Σ w, masked |
| `sum`, none | Σ w·l | none: sums of micro-batches add up |

`ObservedLoss` replaces a loss in the compiled model. It returns what the loss returns, and records
those units. Losses with the same units share a window (`UnitGroup`); others need their own. Losses
that layers add (`add_loss`, activity regularisers) are per sample in Keras. Weight regularisers are
the same in every micro-batch, so they may be part of any mean.

Before the first window, `GradientAccumulateModel` looks at one micro-batch: it computes its losses
and those of its halves, in inference mode, so that nothing is drawn and no statistics move. Value ×
units must add up, and so must the units. A loss or model that compares samples (contrastive losses,
a mean over the batch), or a `units=` that counts something else, is refused. It costs two forwards,
once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
from keras import ops, tree
from keras.src import backend
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss, get_loss

from wholebatch.errors import LossError, WindowError

SAMPLES = "samples"
SUM = "sum"

Inputs: TypeAlias = tuple[Any, Any, Any]
"""x, y and sample_weight."""


def wide() -> str:
    """Return the dtype that units are counted in: float64 if Keras computes in it, else float32."""
    return "float64" if keras.config.floatx() == "float64" else "float32"


@dataclass(frozen=True)
class NotedLoss:
    """One loss of a micro-batch: its weighted value and its units."""

    key: Hashable
    value: Any
    units: Any


@dataclass(frozen=True)
class UnitGroup:
    """The losses of a micro-batch with the same units, added; `units` is None for sums."""

    loss: Any
    units: Any


class ObservedLoss:
    """A Keras loss that records its units when it is called."""

    def __init__(self, loss: Any, weight: float | None, noted: list[NotedLoss]) -> None:
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
        if key != SUM:
            weighted = weighted * replicas()  # Keras divides means by their number.
        self.noted.append(NotedLoss(key, weighted, units))
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
        self.noted: list[NotedLoss] = []

    def build(self, y_true: Any, y_pred: Any) -> None:
        super().build(y_true, y_pred)
        self._flat_losses = [
            entry._replace(loss=ObservedLoss(entry.loss, entry.loss_weights, self.noted))
            for entry in self._flat_losses
        ]

    def call(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.noted.clear()
        value = super().call(y_true, y_pred, sample_weight)
        if not tree.is_nested(y_true) and not tree.is_nested(y_pred):
            del self.noted[1:]  # Here Keras computes all losses but uses only the first.
        return value


def replicas() -> int:
    """Return the number of replicas of tf.distribute that this step runs on."""
    if keras.backend.backend() != "tensorflow":
        return 1
    import tensorflow as tf

    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def samples_in(x: Any) -> Any:
    """Return the number of samples of a model's inputs."""
    first = next(each for each in tree.flatten(x) if each is not None)
    if keras.backend.backend() != "tensorflow":
        return first.shape[0]
    import tensorflow as tf

    return tf.shape(first)[0]


def run_losses(model: Any, inputs: Inputs, *, training: bool) -> tuple[Any, Any, list[UnitGroup]]:
    """Return the predictions of a model that holds its variables, its loss, and that by units."""
    x = inputs[0]
    y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
    return y_pred, *losses_by_units(model, inputs, y_pred, training=training)


def losses_by_units(
    model: Any, inputs: Inputs, y_pred: Any, *, training: bool
) -> tuple[Any, list[UnitGroup]]:
    """Return a micro-batch's loss as Keras computes it, and grouped by units (most have one)."""
    x, y, weight = inputs
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight, training=training)
    total = ops.cast(loss, wide())
    if model.count_units is None:
        return loss, _groups_of(model, total, ops.cast(samples_in(x), wide()))
    units = ops.cast(model.count_units(x, y, weight), wide())
    return loss, [UnitGroup(total * replicas(), units)]


def _groups_of(model: Any, total: Any, samples: Any) -> list[UnitGroup]:
    """Return the losses that were noted, and those that layers added, grouped by units."""
    noted = getattr(model._compile_loss, "noted", ())
    if not noted:
        return [UnitGroup(total * replicas(), samples)]
    added = list(model.losses)
    only_regularisers = len(added) == len(model._get_regularization_losses())
    key, units = noted[0].key, noted[0].units
    shared = all(term.key == key for term in noted)
    if shared and (not added or key == SAMPLES or (only_regularisers and key != SUM)):
        # Losses with SAMPLES differ only in fixed shapes: the units of one hold for all.
        return [UnitGroup(total if key == SUM else total * replicas(), units)]
    groups: dict[Hashable, UnitGroup] = {}
    for term in noted:
        _add(groups, term.key, UnitGroup(term.value, term.units))
    if added:
        rest = sum(ops.sum(ops.cast(each, wide())) for each in added)
        mean = next((key for key in groups if key != SUM), SAMPLES)
        joins_any = only_regularisers and SAMPLES not in groups
        _add(groups, mean if joins_any else SAMPLES, UnitGroup(rest, samples))
    return list(groups.values())


def _add(groups: dict[Hashable, UnitGroup], key: Hashable, group: UnitGroup) -> None:
    """Add losses to those with the same units, if there are any."""
    before = groups.get(key)
    groups[key] = group if before is None else UnitGroup(before.loss + group.loss, before.units)


def halves(data: Any) -> list[Any] | None:
    """Return a batch and its two halves; None if it cannot be halved."""
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    sizes = {tuple(getattr(leaf, "shape", ()))[:1] for leaf in leaves}
    if len(sizes) != 1 or any(
        type(leaf).__name__.startswith(("Ragged", "Sparse")) for leaf in leaves
    ):
        return None
    ((samples, *_),) = sizes or {(0,)}
    if not isinstance(samples, int) or samples < 2:
        return None
    middle = (samples + 1) // 2
    parts = (slice(None), slice(middle), slice(middle, None))
    return [tree.map_structure(lambda leaf, part=part: _copy(leaf, part), data) for part in parts]


def _copy(leaf: Any, part: slice) -> Any:
    """Return some samples. Keras on torch multiplies sample weights by masks in place."""
    if leaf is None:
        return None
    copy = getattr(leaf[part], "clone", None) or getattr(leaf[part], "copy", None)
    return leaf[part] if copy is None else copy()


def look_at(found: Sequence[Sequence[UnitGroup]]) -> None:
    """Refuse losses of a batch that are not those of its halves together."""
    whole, *parts = ([_numbers(group) for group in groups] for groups in found)
    for index, (total, units) in enumerate(whole):
        totals, counts = zip(*(part[index] for part in parts), strict=True)
        if not all(map(math.isfinite, (total, *totals, units, *counts))):
            continue  # nonfinite= decides
        if not _adds_up(units, counts, units):
            raise LossError(
                f"the units of a micro-batch are {units:g}, and those of its halves {counts[0]:g} "
                f"and {counts[1]:g}: units= must count what adds up (samples, tokens, weights)"
            )
        if not _adds_up(total, totals, units):
            raise LossError(
                f"the loss of a micro-batch (mean × units) is {total:.6g}, and those of its halves "
                f"are {totals[0]:.6g} and {totals[1]:.6g}: the loss, or the model under it, "
                "compares samples (a contrastive loss, a statistic of the batch), or it is a mean "
                "over other units than those counted. No window of micro-batches gives the update "
                "of its whole batch; audit=False turns this look off"
            )


def _numbers(group: UnitGroup) -> tuple[float, float]:
    loss = float(ops.convert_to_numpy(group.loss))
    if group.units is None:
        return loss, 0.0
    units = float(ops.convert_to_numpy(group.units))
    return loss * units, units


def _adds_up(whole: float, parts: Sequence[float], units: float) -> bool:
    """True if the parts make the whole, up to rounding: 16-bit layers round by 1/256."""
    narrow = keras.config.dtype_policy().compute_dtype in ("float16", "bfloat16")
    size = abs(whole) + sum(map(abs, parts))
    return abs(whole - sum(parts)) <= (3e-2 if narrow else 1e-3) * size + 1e-6 * max(units, 1.0)


def look_with_variables(model: Any, data: Any) -> bool:
    """Look where the model holds its variables (TensorFlow, torch); put back what a forward moved.

    Return False if this batch cannot be halved.
    """
    parts = halves(data)
    if parts is None:
        return False

    def moved() -> list[Any]:
        return [*model.non_trainable_variables, *model.metrics_variables]

    before = {id(v): ops.convert_to_numpy(v) for v in moved()}
    inputs = map(keras.utils.unpack_x_y_sample_weight, parts)
    found = [run_losses(model, each, training=False)[-1] for each in inputs]
    for variable in moved():
        if id(variable) in before:
            variable.assign(before[id(variable)])
    look_at(found)
    return True


@keras.saving.register_keras_serializable(package="wholebatch")
class CountedLoss(keras.losses.Loss):  # type: ignore[misc]
    """A loss that passes its units to a GradientAccumulateOptimizer (`optimizer.loss(...)`)."""

    def __init__(self, loss: Any, name: str | None = None) -> None:
        self.loss = loss if isinstance(loss, keras.losses.Loss) else None
        self._given = loss
        self.optimizer: Any = None
        super().__init__(name=name or "counted_loss")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if self.optimizer is None:
            raise WindowError(
                "this loss was loaded from a file and has no optimizer: compile the model again "
                "with loss=optimizer.loss(...)"
            )
        if self.loss is None:
            self.loss = get_loss(self._given, y_true, y_pred)
        noted: list[NotedLoss] = []
        value = ObservedLoss(self.loss, None, noted)(y_true, y_pred, sample_weight)
        units = noted[0].units
        self.optimizer.note(ops.ones((), wide()) if units is None else units)
        return value

    def get_config(self) -> dict[str, Any]:
        return {"loss": keras.saving.serialize_keras_object(self._given), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**{**config, "loss": keras.saving.deserialize_keras_object(config["loss"])})
