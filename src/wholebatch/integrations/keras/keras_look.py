"""The look at the first micro-batch: its loss must be that of its two halves together.

Before the first window, `GradientAccumulateModel` computes the losses of one micro-batch and of its
halves, in inference mode, so that nothing is drawn and no statistics move. Value × units must add
up, and so must the units. A loss or model that compares samples (contrastive losses, a mean over
the batch), or a `units=` that counts something else, is refused. It costs two forwards, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops, tree

from wholebatch.errors import LossError
from wholebatch.integrations.keras.loss_units import Group

__all__ = ["halves", "look_at", "look_with_variables"]

Evaluate = Callable[[Any, Any, Any], Sequence[Group]]


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


def look_at(found: Sequence[Sequence[Group]]) -> None:
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


def _numbers(group: Group) -> tuple[float, float]:
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


def look_with_variables(model: Any, data: Any, evaluate: Evaluate) -> bool:
    """Look where the model holds its variables (TensorFlow, torch); put back what a forward moved.

    Return False if this batch cannot be halved.
    """
    parts = halves(data)
    if parts is None:
        return False

    def moved() -> list[Any]:
        return [*model.non_trainable_variables, *model.metrics_variables]

    before = {id(v): ops.convert_to_numpy(v) for v in moved()}
    found = [evaluate(*keras.utils.unpack_x_y_sample_weight(part)) for part in parts]
    for variable in moved():
        if id(variable) in before:
            variable.assign(before[id(variable)])
    look_at(found)
    return True
