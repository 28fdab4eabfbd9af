"""The units of Keras losses, observed while Keras computes them.

Keras reduces every loss to a number itself (`keras.losses.Loss.reduction`):

| reduction | the number | units |
|---|---|---|
| `sum_over_batch_size`, `mean` | Σ w·l / n | n loss values; with a mask those kept |
| `mean_with_sample_weight` | Σ w·l / Σ w | Σ w, masked |
| `sum`, none | Σ w·l | none: sums of micro-batches add up |

`ObservedLoss` replaces a loss in the compiled model. It returns what the loss returns, and records
those units. All losses of a model must have the same units. Losses that layers add (`add_loss`,
activity regularisers) are per sample in Keras. Weight regularisers are the same in every
micro-batch, so they may be part of any mean.

Before the first window, `GradientAccumulateModel` tests one micro-batch: it computes its loss
and those of its halves, in inference mode, so that nothing is drawn and no statistics move. Value ×
units must add up, and so must the units. A loss or model that compares samples (contrastive losses,
a mean over the batch), or a `units=` that counts something else, is refused. It costs two forwards,
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
from keras import ops, tree
from keras.src import backend
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss

from wholebatch.errors import LossError

SAMPLES = "samples"
SUM = "sum"

Inputs: TypeAlias = tuple[Any, Any, Any]
"""x, y and sample_weight."""


def wide() -> str:
    """Return the dtype that units are counted in: float64 if Keras computes in it, else float32."""
    return "float64" if keras.config.floatx() == "float64" else "float32"


NO_UNITS: Any = object()
"""The units of a sum: sums of micro-batches add up as they are."""


@dataclass(frozen=True)
class NotedLoss:
    """The units of one loss of a micro-batch; losses with the same `key` have the same."""

    key: Hashable
    units: Any


class ObservedLoss:
    """A Keras loss that records its units when it is called."""

    def __init__(self, loss: Any, noted: list[NotedLoss]) -> None:
        self.loss = loss
        self.noted = noted
        self.name = loss.name

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        losses: list[Any] = []
        original = self.loss.call

        def call(y_true: Any, y_pred: Any) -> Any:
            losses.append(original(y_true, y_pred))
            return losses[-1]

        self.loss.call = call  # On the instance, so that other losses are not affected.
        try:
            value = self.loss(y_true, y_pred, sample_weight)
        finally:
            del self.loss.call
        self.noted.append(NotedLoss(*self._units(losses, y_pred, sample_weight)))
        return value

    def _units(self, losses: list[Any], y_pred: Any, sample_weight: Any) -> tuple[Hashable, Any]:
        reduction = self.loss.reduction
        if reduction in ("sum", "none", None):
            return SUM, NO_UNITS
        if len(losses) != 1 or len(losses[0].shape) == 0:
            raise LossError(
                f"the loss {self.name!r} returns one number, which may be a sum or a mean: let it "
                "return one value per sample, or pass GradientAccumulateModel(..., units=), a "
                "function that counts what it is a mean over"
            )
        values = losses[0]
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
            entry._replace(loss=ObservedLoss(entry.loss, self.noted)) for entry in self._flat_losses
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


def run_loss(model: Any, inputs: Inputs, *, training: bool) -> tuple[Any, Any, Any]:
    """Return the loss of a model, its units, and the model's outputs."""
    x = inputs[0]
    y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
    return *model.loss_and_units(x, *inputs[1:], y_pred, training=training), y_pred


def units_of(model: Any, inputs: Inputs) -> Any:
    """Return the units of the loss that was computed last; NO_UNITS if it is a sum."""
    x, y, weight = inputs
    if model.count_units is not None:
        return ops.cast(model.count_units(x, y, weight), wide())
    samples = ops.cast(samples_in(x), wide())
    noted = getattr(model._compile_loss, "noted", ())
    if not noted:  # only losses that layers add
        return samples
    added = list(model.losses)
    only_regularisers = len(added) == len(model._get_regularization_losses())
    key, units = noted[0].key, noted[0].units
    shared = all(loss.key == key for loss in noted)
    # Losses with SAMPLES differ only in fixed shapes: the units of one hold for all.
    if shared and (not added or key == SAMPLES or (only_regularisers and key != SUM)):
        return units
    raise LossError(
        "the model's losses are over different units (a mask on one of several outputs, a mean "
        "beside a sum, or a loss that a layer adds beside a masked one), and a window can divide "
        "by one count only: give all outputs the same mask and reduction, or train them in "
        "separate models"
    )


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


def check_halves(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Refuse a loss (with its units) of a batch that is not that of its halves together."""
    (total, units), *parts = (_numbers(*each) for each in pairs)
    totals, counts = zip(*parts, strict=True)
    if not all(map(math.isfinite, (total, *totals, units, *counts))):
        return  # nonfinite= decides
    if not _adds_up(units, counts, units):
        raise LossError(
            f"the units of a micro-batch are {units:g}, and those of its halves {counts[0]:g} "
            f"and {counts[1]:g}: units= must count what adds up (samples, tokens, weights)"
        )
    if not _adds_up(total, totals, units):
        raise LossError(
            f"the loss of a micro-batch (mean × units) is {total:.6g}, and those of its halves are "
            f"{totals[0]:.6g} and {totals[1]:.6g}: the loss, or the model under it, compares "
            "samples (a contrastive loss, a statistic of the batch), or it is a mean over other "
            "units than those counted. audit=False turns this test off"
        )


def _numbers(loss: Any, units: Any) -> tuple[float, float]:
    loss = float(ops.convert_to_numpy(loss))
    if units is NO_UNITS:
        return loss, 0.0
    units = float(ops.convert_to_numpy(units))
    return loss * units, units


def _adds_up(whole: float, parts: Sequence[float], units: float) -> bool:
    """True if the parts make the whole, up to rounding: 16-bit layers round by 1/256."""
    narrow = keras.config.dtype_policy().compute_dtype in ("float16", "bfloat16")
    size = abs(whole) + sum(map(abs, parts))
    return abs(whole - sum(parts)) <= (3e-2 if narrow else 1e-3) * size + 1e-6 * max(units, 1.0)


def test_loss(model: Any, data: Any, scope: Callable[[], Any]) -> bool:
    """Compare the loss of a micro-batch with those of its halves; False if it cannot be halved.

    `scope()` is a StatelessScope: what a forward changes in it is forgotten.
    """
    parts = halves(data)
    if parts is None:
        return False
    pairs = []
    for part in parts:
        with scope():
            inputs = keras.utils.unpack_x_y_sample_weight(part)
            pairs.append(run_loss(model, inputs, training=False)[:2])
    check_halves(pairs)
    return True
