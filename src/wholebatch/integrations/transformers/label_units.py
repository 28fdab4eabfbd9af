"""The units of a Trainer's loss: the labels that count.

A causal language model's loss compares the logits of place t with the label of place t + 1, so the
first label of a sample never counts. Transformers says which of its losses do that. A loss that it
does not know is measured once, before the first step: the mean over two sets of places must be the
mean of their means, weighted by how many labels each has; only the right count makes it so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from wholebatch.errors import LossError, NonFiniteError

_HELP = "pass exact(Trainer, units=a function of the batch's inputs) that counts it"
_LIBRARIES = ("transformers.", "trl.")
# What rounding leaves of the right count's residual is far below this.
_AGREES = 1e-4


def count_labels(inputs: Mapping[str, Any], shifts: Callable[[], bool]) -> int | Tensor:
    """Return how many labels of these inputs count; `shifts()`: the first of a sample does not."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor):
        raise LossError(
            "nothing says what the loss is a mean over: the batch has no tensor of 'labels'; "
            f"{_HELP}"
        )
    if labels.is_floating_point():  # a regression, or several labels at once
        return labels.numel()
    if "shift_labels" not in inputs and labels.dim() > 1 and shifts():
        labels = labels[..., 1:]
    return (labels != -100).sum()


def known_shift(trainer: Any) -> bool | None:
    """Return True if the loss compares place t with label t + 1, None if that is not known.

    It is known of the losses of Transformers and TRL themselves.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    home: str = getattr(trainer.compute_loss, "__module__", "") or ""
    if trainer.compute_loss_func is not None or not home.startswith(_LIBRARIES):
        return None
    kind = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "")
    if home.startswith("trl."):
        return True
    return None if kind is None else kind is ForCausalLMLoss


def measured_shift(mean_of: Callable[[dict[str, Any]], Tensor], inputs: Mapping[str, Any]) -> bool:
    """Return True if the loss leaves out the first label, as evaluated on these inputs.

    Labels are kept at places 0 and 1 of all samples, at 2 and 3 of every other one, and at both.
    If the first never counts, the first set has 1 label per sample, else 2; the second has 2 per
    sample that it is in. A mean of the samples' own means fits neither.
    """
    labels: Tensor = inputs["labels"]
    if labels.dim() != 2 or labels.shape[-1] < 4:
        raise LossError(
            f"the loss is not one that Transformers knows, and labels of shape "
            f"{tuple(labels.shape)} do not let us find out what it is a mean over: {_HELP}"
        )
    rows, places = labels.shape[0], torch.arange(labels.shape[-1], device=labels.device)
    even = torch.arange(rows, device=labels.device)[:, None] % 2 == 0
    first_set, second_set = places < 2, even & (places > 1) & (places < 4)
    valid = labels.where(labels != -100, 0)

    def mean_at(kept: Tensor) -> float:
        return float(mean_of({**inputs, "labels": valid.where(kept, -100)}))

    first, second, both = map(mean_at, (first_set, second_set, first_set | second_set))
    if not all(map(math.isfinite, (first, second, both))):
        raise NonFiniteError(
            f"the loss is {both:g} on this batch, so it cannot be found out what it is a mean "
            f"over: mend the batch or the model (its first update was not made yet), or {_HELP}"
        )
    in_second = 2 * ((rows + 1) // 2)
    residual = {}
    for shifted, in_first in ((True, rows), (False, 2 * rows)):
        total = (in_first + in_second) * both
        residual[shifted] = abs(total - in_first * first - in_second * second) / abs(total)
    best = min(residual, key=residual.__getitem__)
    if not (residual[best] <= _AGREES and residual[not best] >= 10 * residual[best]):
        raise LossError(
            "the loss is not the mean over the labels that are not -100, shifted or not, so "
            f"nothing says what its units are: {_HELP}"
        )
    return best


def counted_by_trainer(trainer: Any, batches: Iterable[Mapping[str, Any]]) -> Tensor | None:
    """Return this rank's `num_items_in_batch` as the Trainer counts it; None if it does not."""
    if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return None
    counts = []
    for inputs in batches:
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, Tensor):
            return None
        if "shift_labels" not in inputs and getattr(trainer, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        counts.append(labels.ne(-100).sum())
    return torch.stack(counts).sum().double() if counts else None
